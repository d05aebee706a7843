import math

import pytest

from headrace.doctor.evidence import Evidence
from headrace.doctor.learning import forecast, tail, waits_for_data


def test_a_figure_is_averaged_over_the_end_of_the_run() -> None:
    assert tail([{"ce": float(n)} for n in range(10)], "ce") == 8.5
    assert tail([{"ce": 4.0}, {}], "ce") == 4.0
    assert tail([], "ce") is None


def test_an_outlook_goes_on_along_the_line() -> None:
    taus = [(n, 1000.0 * 2**n, 1.5 + 0.2 * n) for n in range(10)]
    found = forecast(Evidence(metrics=[{"step": 1, "tokens": 5}], taus=taus))
    assert found is not None
    assert "2x: 3.50 (± 0.00)" in found.evidence[2]
    assert f"10x: {3.3 + 0.2 * math.log2(10):.2f}" in found.evidence[2]


def test_too_few_evaluations_allow_no_outlook() -> None:
    assert forecast(Evidence(taus=[(n, 1000.0 * n, 1.5) for n in range(1, 4)])) is None


@pytest.mark.parametrize(("wait", "told"), [(0.19, False), (0.21, True)])
def test_waiting_counts_from_a_fifth_on(wait: float, told: bool) -> None:
    run = Evidence(metrics=[{"step": n, "data_wait_share": 0.9 if n < 50 else wait} for n in range(1, 100)])
    assert (waits_for_data(run) is not None) == told
