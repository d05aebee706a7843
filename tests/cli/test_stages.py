"""Stages are timed, also when they end early, and settings lie beside their output."""

from pathlib import Path

import pytest

from headrace.cli.stages import STAGES, Run
from headrace.config import load_run_file
from headrace.files import stage_seconds
from headrace.progress import Silent


def a_run(root: Path) -> Run:
    return Run(load_run_file(None, [f"run={root}/run"]), Silent())


def test_stages_come_in_the_order_of_the_data() -> None:
    assert list(STAGES) == ["prepare", "regenerate", "capture", "train", "export", "eval", "report"]


def test_a_stage_that_is_interrupted_is_timed_too(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with pytest.raises(KeyboardInterrupt), run.timed("train", run.folder.train()):
        raise KeyboardInterrupt
    with run.timed("train", run.folder.train()):
        pass
    assert set(stage_seconds(run.folder.root)) == {"train"}
    assert (run.folder.train() / "run.resolved.yaml").exists()
