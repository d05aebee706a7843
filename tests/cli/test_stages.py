"""Stages are timed, also when they end early, and settings lie beside their output."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.stages import STAGES, Run, Summary, run_all
from headrace.config import load_run_file
from headrace.errors import ConfigError
from headrace.files import Stage, locked, stage_seconds
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


def resolved(folder: Path) -> str:
    return (folder / "run.resolved.yaml").read_text()


def test_a_refused_start_changes_no_record_of_the_settings(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    where = run.folder.train()
    with pytest.raises(ConfigError), run.timed("train", where):
        raise ConfigError("the same lr", "another", "choose another folder")
    assert not where.exists()
    assert stage_seconds(run.folder.root) == {}
    stage = Stage(where, "train", {})
    with run.timed("train", where):
        stage.begin()
        stage.finish({})
    before = resolved(where)
    other = Run(load_run_file(None, [f"run={tmp_path}/run", "train.lr=0.5"]), Silent())
    with pytest.raises(ConfigError), other.timed("train", where):
        raise ConfigError("the same lr", "another", "choose another folder")
    with other.timed("train", where):
        pass  # done before, kept
    assert resolved(where) == before


def test_a_stage_that_goes_on_keeps_its_last_settings(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    where = run.folder.train()
    Stage(where, "train", {}).begin()
    with pytest.raises(KeyboardInterrupt), run.timed("train", where):
        raise KeyboardInterrupt
    other = Run(load_run_file(None, [f"run={tmp_path}/run", "train.save_seconds=7"]), Silent())
    with other.timed("train", where):
        Stage(where, "train", {}).finish({})
    assert "save_seconds: 7.0  # flag" in resolved(where)


def test_a_second_process_in_a_stage_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with (
        locked(run.folder.train(), "train"),
        pytest.raises(ConfigError, match="another process"),
        run.timed("train", run.folder.train()),
    ):
        pytest.fail("let in")


def test_a_streamed_run_captures_nothing_and_needs_the_prepared_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(load_run_file(None, [f"run={tmp_path}/run", "source=grpc://127.0.0.1:9"]), Silent())
    called: list[str] = []

    def noted(name: str) -> Callable[[Run], Summary]:
        return lambda _run: {"called": called.append(name)}

    monkeypatch.setattr("headrace.cli.stages.STAGES", {name: noted(name) for name in STAGES})
    with pytest.raises(ConfigError, match="the prepared set that is served"):
        run_all(run)
    assert called == []
    run.folder.prepared.mkdir(parents=True)
    run_all(run)
    assert called == ["train", "export", "eval", "report"]
