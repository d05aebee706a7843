"""What results.json holds, and from where."""

import json
from pathlib import Path

import pytest

from headrace.config import RunFolder
from headrace.errors import HeadraceError
from headrace.files import read_json_lines, stage_seconds
from headrace.report.results import KEYS, gather


def a_run(root: Path) -> RunFolder:
    """A folder as the stages leave it, with made-up figures."""
    folder = RunFolder(root)
    margin = {"value": 0.4, "low": 0.3, "high": 0.5}
    evaluation = {
        "tau": 1.9, "tau_interval": [1.8, 2.0], "tau_untrained": 1.0, "tau_no_features": 1.5, "tau_prompt_lookup": 1.1,
        "margin_no_features": margin, "margin_prompt_lookup": margin, "greedy_identical": True, "num_ties": 0,
        "num_prompts": 48, "per_task": {"lists": {"tau": 2.0, "num_prompts": 8}}, "per_slot": [0.6, 0.3],
        "seconds_plain": 20.0, "seconds_speculative": 14.0,
    }  # fmt: skip
    for path, value in (
        (folder.evaluation / "stage.json", evaluation),
        (folder.states / "stage.json", {"bytes_raw": 2000, "bytes_stored": 2100, "num_tokens": 10}),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"identity": {}, "finished": True, "summary": value}))
    lines = [{"stage": "train", "seconds": 2.0}, {"stage": "eval", "seconds": 1.5}, {"stage": "train", "seconds": 1.0}]
    (root / "stages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stage": "tor')
    metrics = [{"step": 1, "loss": 3.0, "tau": None}, {"step": 2, "loss": 2.0, "tau": 1.5}]
    folder.train().mkdir()
    (folder.train() / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def test_results_hold_every_promised_key(tmp_path: Path) -> None:
    results = gather(a_run(tmp_path))
    promised = {"tau", "tau_untrained", "tau_no_features", "tau_prompt_lookup", "greedy_identical", "num_prompts"}
    assert promised | {"wall_seconds", "bytes_raw", "bytes_stored"} | set(KEYS) <= set(results)
    assert results["wall_seconds"] == 4.5


def test_every_start_of_a_stage_counts(tmp_path: Path) -> None:
    assert stage_seconds(a_run(tmp_path).root) == {"train": 3.0, "eval": 1.5}


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    assert len(read_json_lines(a_run(tmp_path).root / "stages.jsonl")) == 3
    assert read_json_lines(tmp_path / "none.jsonl") == []


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="headrace eval"):
        gather(RunFolder(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", '{"finished": false, "summary": {}}'])
def test_a_damaged_stage_is_named(tmp_path: Path, content: str) -> None:
    folder = a_run(tmp_path)
    (folder.states / "stage.json").write_text(content)
    with pytest.raises(HeadraceError, match=r"states/stage\.json"):
        gather(folder)


def test_an_unfinished_stage_says_what_to_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder.states / "stage.json").write_text('{"identity": {}, "finished": false, "summary": {}}')
    with pytest.raises(HeadraceError, match="headrace capture"):
        gather(folder)


def test_figures_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder.train() / "last").mkdir()
    (folder.train() / "last" / "model.safetensors").write_bytes(b"newer weights")
    with pytest.raises(HeadraceError, match="headrace eval"):
        gather(folder)
