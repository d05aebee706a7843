import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from headrace.errors import PlanError
from headrace.plan.inputs import make_inputs
from headrace.plan.plan import Plan, make_plan
from headrace.plan.report import TITLES, cost_against_disk, figure_text, render, save_plan, to_json
from tests.plan.models import the_data_set


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(
        the_data_set(tmp_path, capture_gpu="rtx-pro-6000:2", train_gpu="b200:8", link="10gbe", disk_budget="4 TB")
    )


def text(plan: Plan, explain: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=220).print(render(plan, explain))
    return out.getvalue()


def test_the_json_has_its_stable_keys_and_no_infinity(plan: Plan) -> None:
    found = json.loads(json.dumps(to_json(plan), allow_nan=False))
    assert found["bytes_per_token"] == 51_200
    assert found["total_bytes"] == 913_786 * 800 * 51_200
    assert {o["way"] for o in found["options"]} == {"store", "stream", "cache"}
    assert found["recommendation"]["best"]["codec"] == "latent:5120x8"


def test_a_plan_where_nothing_fits_is_json_too(tmp_path: Path) -> None:
    impossible = make_plan(the_data_set(tmp_path, capture_gpu="rtx-4090"))
    found = json.loads(json.dumps(to_json(impossible), allow_nan=False))
    assert found["recommendation"]["best"] is None
    assert "nothing is possible" in text(impossible, explain=False)


def test_the_table_shows_both_kinds_of_units_and_says_what_is_modelled(plan: Plan) -> None:
    shown = text(plan, explain=False)
    assert "37.43 TB (34,858 GiB)" in shown
    assert "~ modelled" in shown
    assert "z-lab's numbers" in shown
    assert "sources" not in shown


def test_explain_shows_every_formula_and_its_sources(plan: Plan) -> None:
    shown = text(plan, explain=True)
    assert "913,786 samples x 800 tokens x 51,200 B" in shown
    assert "2026-09-05: RunPod" in shown
    assert all(figure.formula for figure in plan.figures.values())
    assert set(plan.figures) <= set(TITLES)


def test_figures_are_shown_in_their_units(plan: Plan) -> None:
    assert figure_text(plan.figures["train_link_bytes_s"]).endswith("Gbit/s)")
    assert figure_text(plan.figures["bytes_per_token"]) == "51,200 B/token"
    assert figure_text(plan.figures["capture_s"]) == "24.5 h"


def test_cost_falls_as_the_disk_grows(plan: Plan) -> None:
    points = cost_against_disk(plan, 6)
    for codec in plan.codecs:
        costs = [p.usd for p in points if p.codec == codec.name]
        assert len(costs) == 6
        assert all(a is not None and b is not None and b <= a + 1e-6 for a, b in pairwise(costs))


def test_points_have_hours_where_no_price_is_known() -> None:
    small = make_plan(make_inputs(model="demo", num_samples=10, mean_tokens=100, capture_gpu="b300"))
    points = cost_against_disk(small, 3)
    assert all(p.usd is None and p.hours > 0 for p in points)


def test_a_plan_that_cannot_be_saved_leaves_nothing_behind(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for path in (folder, tmp_path / "file" / "plan.json"):
        with pytest.raises(PlanError, match="save"):
            save_plan(plan, path)
    assert sorted(tmp_path.rglob("*")) == before
