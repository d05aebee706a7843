import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import PlanError
from headrace.plan.inputs import make_inputs
from headrace.plan.measure import apply_measurement, check, check_saved, from_timings
from headrace.plan.plan import make_plan
from headrace.plan.report import save_plan

INPUTS = make_inputs(model="demo", num_samples=10, mean_tokens=100, mean_answer=40, epochs=2)
MEASURED = from_timings("here", "2026-11-30", capture=[(100, 1), (300, 1), (200, 1)], train=[(100, 2)])


def test_the_median_of_the_runs_is_planned_with() -> None:
    assert (MEASURED.capture_tokens_s, MEASURED.train_tokens_s, MEASURED.decode_tokens_s) == (200, 50, None)
    assert MEASURED.num_runs == 3
    plan = make_plan(apply_measurement(INPUTS, MEASURED))
    assert plan.figures["capture_s"].value == 5
    assert plan.figures["train_s"].value == 40
    assert "decode_s" not in plan.figures


def test_runs_of_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="capture"):
        from_timings("here", "now", capture=[(0, 1)])


def test_plan_and_reality_stand_side_by_side() -> None:
    plan = make_plan(apply_measurement(INPUTS, MEASURED))
    real = {"total_bytes": plan.figures["total_bytes"].value * 1.005, "capture_s": 6.0, "train_s": 60.0}
    rows = {row.name: row for row in check(plan, real)}
    assert rows["total_bytes"].ok
    assert rows["capture_s"].ok
    assert rows["capture_s"].ratio == pytest.approx(1.2)
    assert not rows["train_s"].ok
    assert "NOT within 25%" in rows["train_s"].text()


def test_a_run_that_ended_early_is_laid_beside_its_share_of_the_time() -> None:
    plan = make_plan(apply_measurement(INPUTS, MEASURED))
    (row,) = check(plan, {"train_s": 10.0, "train_tokens": 500})
    assert row.planned == 10
    assert row.ok


def test_a_saved_plan_is_checked_and_made_again(tmp_path: Path) -> None:
    plan = make_plan(apply_measurement(INPUTS, MEASURED))
    save_plan(plan, tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert check_saved(saved, {"capture_s": 5.0})[0].ok
    assert make_plan(make_inputs(**saved["inputs"])).figures == plan.figures


@pytest.mark.parametrize("real", [{"speed": 3.0}, {}, {"decode_s": 3.0}])
def test_what_was_not_planned_is_not_compared(real: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        check(make_plan(apply_measurement(INPUTS, MEASURED)), real)


def test_a_file_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="a plan saved"):
        check_saved({"plan": {}}, {"capture_s": 1.0})


@pytest.mark.parametrize(
    "plan",
    [
        [],
        {},
        {"figures": []},
        {"figures": {"total_bytes": {}}},
        {"figures": {"total_bytes": 5}},
        {"figures": {"total_bytes": {"value": "x"}}},
        {"figures": {"total_bytes": {"value": True}}},
        {"figures": {"total_bytes": {"value": float("nan")}}},
        {"figures": {"total_bytes": {"value": 10**400}}},
    ],
)
def test_figures_that_are_none_are_refused(plan: Any) -> None:
    with pytest.raises(PlanError):
        check_saved({"plan": plan}, {"total_bytes": 1.0})


def test_what_was_planned_as_nothing_or_not_known_leaves_no_infinity() -> None:
    figures = {"total_bytes": {"value": 0}, "capture_s": {"value": None}}
    (row,) = check_saved({"plan": {"figures": figures}}, {"total_bytes": 5, "capture_s": 2.0})
    assert row.to_json()["ratio"] is None
    assert not row.ok
    assert "none was planned" in row.text()
    assert row.to_json()["planned"] == 0


def test_states_that_were_encoded_are_compared_as_stored() -> None:
    figures = {"total_bytes": {"value": 50}, "stored_bytes": {"value": 60}}
    rows = check_saved({"plan": {"codec": "fp8", "figures": figures}}, {"total_bytes": 100, "stored_bytes": 60})
    assert [row.name for row in rows] == ["stored_bytes"]
