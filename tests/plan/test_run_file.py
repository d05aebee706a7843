"""A plan takes from a run file what it fixes, and from a run's stages what they took."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.codec.spec import CodecSpec
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
    (folder / "stage.json").write_text(json.dumps({"identity": {}, "finished": True, "summary": summary}))


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


@pytest.mark.parametrize(("data", "found"), [(["a.jsonl", "b.jsonl"], "2 files"), (["demo"], "the built-in prompts")])
def test_two_files_and_built_in_prompts_need_a_prepared_set(tmp_path: Path, data: list[str], found: str) -> None:
    cfg = RunFile.model_validate({"prepare": {"data": data}})
    with pytest.raises(PlanError, match=rf"{found} in prepare.data(.|\n)*headrace prepare"):
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
    (tmp_path / "states" / "stage.json").write_text(json.dumps({"identity": {}, "finished": False, "summary": {}}))
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


SECONDS = '{"stage": "capture", "seconds": 2.0}\n'


def test_what_a_run_weighs_is_read_where_nobody_timed_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    finished(folder.states, bytes_raw=100, bytes_stored=120)
    finished(folder.train(), num_tokens=50)
    assert real_figures(folder) == {"total_bytes": 100, "stored_bytes": 120, "train_tokens": 50}


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"finished": true, "summ',
        "[]",
        "5",
        "{}",
        '{"finished": true}',
        '{"finished": true, "summary": []}',
        '{"finished": true, "summary": {}}',
        '{"identity": {}, "finished": true, "summary": {"bytes_raw": 1}}',
        '{"identity": {}, "finished": true, "summary": {"bytes_raw": "x", "bytes_stored": 1}}',
        '{"identity": {}, "finished": true, "summary": {"bytes_raw": NaN, "bytes_stored": 1}}',
    ],
)
def test_a_damaged_stage_is_named(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.states.mkdir()
    (folder.states / "stage.json").write_text(content)
    (tmp_path / "stages.jsonl").write_text(SECONDS)
    with pytest.raises(PlanError, match=r"states/stage\.json"):
        real_figures(folder)


def test_damaged_times_are_named(tmp_path: Path) -> None:
    finished(RunFolder(tmp_path).states, bytes_raw=100, bytes_stored=120)
    (tmp_path / "stages.jsonl").write_text("rubbish\n" + SECONDS)
    with pytest.raises(PlanError, match=r"stages\.jsonl"):
        real_figures(RunFolder(tmp_path))


@pytest.mark.parametrize("content", ["[]", "5", "{}", '{"plan": {}, "made_for": "x"}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"a saved plan at .*plan\.json"):
        load_saved_plan(tmp_path)


def test_a_run_with_a_fitted_codec_is_planned_with_its_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "codec"
    folder.mkdir()
    spec = CodecSpec("latent", 0, 5, 576, "bfloat16", {"groups": [[100, 8], [44, 4]], "basis": "00"})
    (folder / "codec.json").write_text(json.dumps(spec.to_json()))
    cfg = RunFile.model_validate({"capture": {"codec": str(folder)}})
    made = run_inputs(cfg, RunFolder(tmp_path), with_samples=False)
    plan = make_plan(make_inputs(**made, num_samples=10, mean_tokens=100))
    assert plan.codec.value == 100 + 22 + 2 * 2
    assert plan.codec.name == f"latent:144 ({folder})"
    assert yaml.safe_load(plan.recommendation.run_file)["target"]
    save_plan(plan, tmp_path / "plan.json")
    assert make_plan(make_inputs(**load_saved_plan(tmp_path)["inputs"])).codec == plan.codec
