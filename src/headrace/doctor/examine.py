"""All checks of the doctor, in the order in which to read them.

In: the evidence of a run. Out: findings; faults of what is served first, for they make later figures meaningless.
"""

from headrace.doctor.evidence import Evidence
from headrace.doctor.finding import Finding
from headrace.doctor.learning import forecast, gets_worse, near_the_floor, tau_of_one, waits_for_data
from headrace.doctor.serving import drifted, falls_by_kind, falls_with_length, served_below_trained, wrong_template


def examine(run: Evidence) -> list[Finding]:
    """Every finding; of a healthy run at most a note on what more data would bring."""
    one_each = (wrong_template, tau_of_one, drifted, served_below_trained, near_the_floor, gets_worse, waits_for_data)
    found = [finding for check in (*one_each, falls_with_length) if (finding := check(run)) is not None]
    found += falls_by_kind(run)
    outlook = forecast(run)
    return found + ([outlook] if outlook is not None else [])
