"""A plan takes from a run file what it fixes, and from a run's stages what they took."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RunFile, RunFolder
from headrace.errors import PlanError
from headrace.plan.inputs import make_inputs
from headrace.plan.plan import make_plan
from headrace.plan.report import save_plan
from headrace.plan.run_file import load_saved_plan, real_figures, run_inputs
from headrace.prepare.prepared import write_prepared
from tests.train.runs import drafts


def finished(folder: Path, **summary: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "stage.json").write_text(json.dumps({"finished": True, "summary": summary}))


def test_the_prepared_set_gives_exact_lengths(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_prepared(folder.prepared, drafts(9, 2), {"fingerprint": "x"})
    cfg = RunFile.model_validate({"train": {"epochs": 3, "anchors": 7}, "drafter": {"block_size": 4}})
    plan = make_plan(make_inputs(**run_inputs(cfg, folder)))
    assert plan.tokens.exact
    assert plan.tokens.num_samples == 9
    assert (plan.inputs.epochs, plan.inputs.anchors, plan.drafter.block_size) == (3, 7, 4)
    assert plan.codec.value == 5 * 576 * 2


def test_chats_are_sampled_before_there_is_a_prepared_set(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "What is it?", "response": "A wheel."}\n')
    cfg = RunFile.model_validate({"prepare": {"data": [str(chats)]}})
    assert run_inputs(cfg, RunFolder(tmp_path))["chats"] == chats


def test_two_files_of_chats_need_a_prepared_set(tmp_path: Path) -> None:
    cfg = RunFile.model_validate({"prepare": {"data": ["a.jsonl", "b.jsonl"]}})
    with pytest.raises(PlanError, match="headrace prepare"):
        run_inputs(cfg, RunFolder(tmp_path))
    assert "prepared" not in run_inputs(cfg, RunFolder(tmp_path), with_samples=False)


def test_what_a_run_took_is_read_from_its_stages(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    finished(folder.states, bytes_raw=100, bytes_stored=120)
    finished(folder.train(), num_tokens=50)
    lines = [{"stage": "capture", "seconds": 2.0}, {"stage": "train", "seconds": 3.0}, {"stage": "train", "seconds": 1}]
    (tmp_path / "stages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert real_figures(folder) == {
        "total_bytes": 100,
        "stored_bytes": 120,
        "capture_s": 2.0,
        "train_s": 4.0,
        "train_tokens": 50,
    }


def test_a_run_that_has_not_finished_a_stage_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "stage.json").write_text(json.dumps({"finished": False, "summary": {}}))
    with pytest.raises(PlanError, match="captured or trained"):
        real_figures(RunFolder(tmp_path))


def test_a_run_without_a_plan_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"headrace plan RUN\.yaml"):
        load_saved_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"plan": ')
    with pytest.raises(PlanError, match="a saved plan"):
        load_saved_plan(tmp_path)


def test_a_saved_plan_holds_its_cost_by_disk(tmp_path: Path) -> None:
    plan = make_plan(make_inputs(model="demo", num_samples=10, mean_tokens=100, capture_gpu="h100-sxm"))
    save_plan(plan, tmp_path / "plan.json")
    points = load_saved_plan(tmp_path)["cost_against_disk"]
    assert points
    assert {"codec", "disk_bytes", "hours", "usd", "way"} <= set(points[0])
