"""A trial times the real stages on whole capture groups and leaves nothing behind."""

from pathlib import Path

import pytest

from headrace import trial
from headrace.config import RunFile, RunFolder
from headrace.prepare.prepared import PreparedSet, write_prepared
from headrace.progress import Silent
from headrace.target.transformers_target import load_target
from headrace.testing.tiny_target import save_tiny_target
from tests.train.runs import drafts, run_file


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFile, RunFolder]:
    target = save_tiny_target(tmp_path / "target")
    folder = RunFolder(tmp_path / "run")
    write_prepared(folder.prepared, drafts(40, 5), {"fingerprint": "x"})
    cfg = run_file(folder.root, target)
    return cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"group_tokens": 40})}), folder


def test_a_measurement_has_every_rate_and_leaves_nothing_behind(
    run: tuple[RunFile, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "RUN_SECONDS", 0.05)
    cfg, folder = run
    measured = trial.measure(cfg, folder, load_target(cfg.target), 1.5, Silent())
    assert measured.num_runs == 3
    assert measured.capture_tokens_s is not None
    assert measured.capture_tokens_s > 0
    assert measured.train_tokens_s is not None
    assert measured.train_tokens_s > 0
    assert measured.capture_fixed_s == 1.5
    assert measured.train_fixed_s > 0
    assert sorted(path.name for path in folder.root.iterdir()) == ["prepared"]


@pytest.mark.parametrize("codec", ["latent:16x4", "auto"])
def test_codecs_that_are_settled_by_the_capture_are_timed_too(
    run: tuple[RunFile, RunFolder], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(trial, "RUN_SECONDS", 0.05)
    cfg, folder = run
    own = {
        "capture": cfg.capture.model_copy(update={"codec": codec}),
        "store": cfg.store.model_copy(update={"max_bytes": 10**9}),
    }
    measured = trial.measure(cfg.model_copy(update=own), folder, load_target(cfg.target), 1.5, Silent())
    assert measured.capture_tokens_s is not None
    assert measured.train_tokens_s is not None
    assert (measured.capture_fixed_s > 1.5) == (codec != "auto")  # a latent is fitted on a raw slice first
    assert sorted(path.name for path in folder.root.iterdir()) == ["prepared"]


@pytest.mark.parametrize("wanted", [1, 2, 100])
def test_runs_take_whole_groups_from_all_over_the_set(run: tuple[RunFile, RunFolder], wanted: int) -> None:
    cfg, folder = run
    prepared = PreparedSet.open(folder.prepared)
    runs = trial._choose(cfg, prepared, wanted)
    assert len(runs) == 3
    assert all(rows and set(rows) <= set(range(40)) for rows in runs)
    assert wanted == 100 or not set(runs[0]) & set(runs[1])
    assert max(runs[2]) - min(runs[0]) > 20
