import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import RunFolder, TrainConfig
from headrace.errors import ConfigError, TrainError
from headrace.prepare.prepared import Draft
from headrace.progress import Silent
from headrace.record import sample_id
from headrace.train.checkpoint import Checkpoint, load_checkpoint
from headrace.train.load import load_drafter
from headrace.train.loop import train
from headrace.train.schedule import learning_rate
from tests.train.runs import drafts, make_run, run_file, states_of, write_set, write_states

PROJECT = Path(__file__).parents[2]


class At(Silent):
    """Does something once, when a step is reported; that is before the step is saved."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act, self.notes = step, act, list[str]()

    def advance(self, done: int, **figures: float | int | str) -> None:
        if done == self.step:
            self.act()

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A run before training; tests copy it."""
    root = tmp_path_factory.mktemp("captured")
    make_run(root, tiny_target)
    return root


@pytest.fixture
def fresh(captured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "run"))


@pytest.fixture(scope="module")
def uninterrupted(captured: Path, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Checkpoint:
    root = Path(shutil.copytree(captured, tmp_path_factory.mktemp("whole") / "run"))
    torch.set_num_threads(1)
    train(run_file(root, tiny_target), RunFolder(root), True, Silent())
    return load_checkpoint(RunFolder(root).train() / "last")


def lines(root: Path, features: bool = True) -> list[dict[str, Any]]:
    text = (RunFolder(root).train(features) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    """Weights and AdamW's moments, to the bit."""
    assert a.state.step == b.state.step
    assert (a.state.epoch, a.state.place, a.state.tau) == (b.state.epoch, b.state.place, b.state.tau)
    assert a.weights.keys() == b.weights.keys()
    assert a.moments.keys() == b.moments.keys()
    assert any(name.endswith("/exp_avg_sq") for name in a.moments)
    for mine, theirs in ((a.weights, b.weights), (a.moments, b.moments)):
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), name


def test_a_run_leaves_last_best_metrics_and_summary(fresh: Path, tiny_target: Path) -> None:
    folder = RunFolder(fresh)
    summary = train(run_file(fresh, tiny_target, tensorboard=True), folder, True, Silent())
    assert load_checkpoint(folder.train() / "last").state.step == summary["num_steps"]
    assert load_checkpoint(folder.train() / "best").state.tau == summary["best_tau"]
    assert summary["num_epochs"] == 2.0
    assert summary["num_samples"] == 12
    steps = [line["step"] for line in lines(fresh)]
    assert steps == list(range(summary["num_steps"] + 1))
    assert {"step", "epoch", "loss", "lr", "tokens_s", "data_wait_share", "grad_norm", "seconds"} <= set(
        lines(fresh)[1]
    )
    assert [line["step"] for line in lines(fresh) if "tau" in line][:2] == [0, 4]
    assert (folder.train() / "tensorboard").is_dir()


def test_a_finished_run_is_not_trained_again(fresh: Path, tiny_target: Path) -> None:
    cfg = run_file(fresh, tiny_target, max_steps=2)
    first = train(cfg, RunFolder(fresh), True, Silent())
    shutil.rmtree(RunFolder(fresh).train() / "last", ignore_errors=True)
    assert train(cfg, RunFolder(fresh), True, At(1, lambda: pytest.fail("trained again"))) == first


def test_a_run_stopped_by_sigterm_goes_on_to_the_same_bits(
    fresh: Path, tiny_target: Path, uninterrupted: Checkpoint
) -> None:
    cfg, folder = run_file(fresh, tiny_target), RunFolder(fresh)
    stopped = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        train(cfg, folder, True, stopped)
    assert left.value.code == 143
    assert load_checkpoint(folder.train() / "last").state.step == 3
    assert any("saved after step 3" in note for note in stopped.notes)
    train(cfg, folder, True, Silent())
    assert_same(load_checkpoint(folder.train() / "last"), uninterrupted)
    assert [line["step"] for line in lines(fresh)] == list(range(uninterrupted.state.step + 1))


def test_a_run_with_replay_goes_on_to_the_same_bits(fresh: Path, tiny_target: Path) -> None:
    cfg, folder = run_file(fresh, tiny_target, draws=2, replay_steps=3), RunFolder(fresh)
    whole = RunFolder(fresh.with_name("whole"))
    shutil.copytree(fresh, whole.root)
    summary = train(cfg, whole, True, Silent())
    assert summary["num_epochs"] == 2.0
    for stop in (3, 6):
        with pytest.raises(SystemExit):
            train(cfg, folder, True, At(stop, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert train(cfg, folder, True, Silent())["num_steps"] == summary["num_steps"]
    assert_same(load_checkpoint(whole.train() / "last"), load_checkpoint(folder.train() / "last"))


def test_an_average_is_evaluated_saved_and_taken_up_again(fresh: Path, tiny_target: Path) -> None:
    cfg, folder = run_file(fresh, tiny_target, ema=0.5), RunFolder(fresh)
    whole = RunFolder(fresh.with_name("whole"))
    shutil.copytree(fresh, whole.root)
    train(cfg, whole, True, Silent())
    with pytest.raises(SystemExit):
        train(cfg, folder, True, At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    train(cfg, folder, True, Silent())
    one, other = (load_checkpoint(own.train() / "last") for own in (whole, folder))
    assert_same(one, other)
    assert one.average
    assert all(torch.equal(value, other.average[name]) for name, value in one.average.items())
    assert not torch.equal(one.average["fc.weight"], one.weights["fc.weight"])
    loaded, _ = load_drafter(whole.train() / "last")
    assert torch.equal(loaded.fc.weight, one.average["fc.weight"])
    assert torch.equal(loaded.feature_scale, one.weights["feature_scale"])


def test_a_run_stopped_by_sigint_is_interrupted_after_saving(fresh: Path, tiny_target: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(run_file(fresh, tiny_target), RunFolder(fresh), True, At(2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert load_checkpoint(RunFolder(fresh).train() / "last").state.step == 2


KILL = """
import os, signal, sys
from pathlib import Path
import torch
from headrace.config import RunFolder
from headrace.train.loop import train
from tests.train.runs import run_file
from tests.train.test_loop import At
torch.set_num_threads(1)
root = Path(sys.argv[1])
killed = At(int(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGKILL))
train(run_file(root, Path(sys.argv[2]), save_seconds=1e-6), RunFolder(root), True, killed)
"""


def test_a_run_killed_goes_on_to_the_same_bits(fresh: Path, tiny_target: Path, uninterrupted: Checkpoint) -> None:
    folder = RunFolder(fresh)
    command = [sys.executable, "-c", KILL, str(fresh), str(tiny_target), "5"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert load_checkpoint(folder.train() / "last").state.step == 4
    (folder.train() / "step-00000099.tmp").mkdir()
    again = At(0, lambda: None)
    train(run_file(fresh, tiny_target), folder, True, again)
    assert any("goes on after step 4" in note for note in again.notes)
    assert_same(load_checkpoint(folder.train() / "last"), uninterrupted)
    assert not (folder.train() / "step-00000099.tmp").exists()


def test_a_run_killed_before_its_first_save_begins_anew(
    fresh: Path, tiny_target: Path, uninterrupted: Checkpoint
) -> None:
    def die() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        train(run_file(fresh, tiny_target), RunFolder(fresh), True, At(2, die))
    train(run_file(fresh, tiny_target), RunFolder(fresh), True, Silent())
    assert_same(load_checkpoint(RunFolder(fresh).train() / "last"), uninterrupted)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"lr": 5e-4}, "train.lr"), ({"anchors": 3}, "train.anchors"), ({"loss": "decay"}, "train.loss")],
)
def test_a_changed_setting_is_refused_by_name(
    fresh: Path, tiny_target: Path, changes: dict[str, Any], name: str
) -> None:
    stop = At(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(run_file(fresh, tiny_target), RunFolder(fresh), True, stop)
    with pytest.raises(ConfigError, match=name):
        train(run_file(fresh, tiny_target, **changes), RunFolder(fresh), True, Silent())


@pytest.mark.parametrize("changes", [{"read_ahead": 1, "save_seconds": 0.001}, {"map_shards": True}])
def test_settings_that_change_no_weight_may_change(
    fresh: Path, tiny_target: Path, uninterrupted: Checkpoint, changes: dict[str, Any]
) -> None:
    stop = At(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(run_file(fresh, tiny_target), RunFolder(fresh), True, stop)
    train(run_file(fresh, tiny_target, **changes), RunFolder(fresh), True, Silent())
    assert_same(load_checkpoint(RunFolder(fresh).train() / "last"), uninterrupted)


def test_states_that_are_not_finite_stop_the_run_and_name_the_sample(tmp_path: Path, tiny_target: Path) -> None:
    prepared = write_set(tmp_path / "prepared", drafts(6, 1))
    states = states_of(prepared.sample(4))
    states[6, 0, 0] = float("nan")
    write_states(tmp_path / "states", prepared, tiny_target, {4: states})
    with pytest.raises(TrainError, match=rf"row 4 \(id {prepared.sample_id(4).hex()}\)"):
        train(run_file(tmp_path, tiny_target), RunFolder(tmp_path), True, Silent())


def test_a_hole_is_counted_once_and_survives_a_resume(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target, changed={5: None})
    told = At(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(run_file(tmp_path, tiny_target, epochs=3), folder, True, told)
    assert load_checkpoint(folder.train() / "last").state.holes == {5: "too long for the engine"}
    summary = train(run_file(tmp_path, tiny_target, epochs=3), folder, True, told)
    assert summary["num_holes"] == 1
    assert len([note for note in told.notes if "row 5" in note]) == 1


def test_the_floor_trains_without_states(fresh: Path, tiny_target: Path) -> None:
    folder = RunFolder(fresh)
    shutil.rmtree(folder.states)
    summary = train(run_file(fresh, tiny_target, epochs=8, lr=5e-3), folder, False, Silent())
    assert summary["features"] is False
    assert summary["tau"] >= 1.0
    losses = [line["ce"] for line in lines(fresh, features=False) if "ce" in line]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert not folder.train().exists()


def test_settings_can_ask_for_a_floor_alone(fresh: Path, tiny_target: Path) -> None:
    cfg = run_file(fresh, tiny_target, max_steps=1)
    cfg = cfg.model_copy(update={"drafter": cfg.drafter.model_copy(update={"features": False})})
    shutil.rmtree(RunFolder(fresh).states)
    assert train(cfg, RunFolder(fresh), True, Silent())["features"] is False


def test_one_sample_seen_again_and_again_is_learned(tmp_path: Path, tiny_target: Path) -> None:
    """The held-out row holds the answer of the training row, after another prompt token: its τ must come close."""
    ids = np.random.default_rng(1).integers(3, 62, 24).astype(np.int32)
    mask = (np.arange(24) >= 4).astype(np.uint8)
    other = ids.copy()
    other[0] = 62
    pair = [Draft(sample_id(i, mask), i, mask, "noise", held) for i, held in ((ids, False), (other, True))]
    prepared = write_set(tmp_path / "prepared", pair)
    same = states_of(prepared.sample(0))
    write_states(tmp_path / "states", prepared, tiny_target, {1: same})
    cfg = run_file(tmp_path, tiny_target, epochs=60, optimizer="adamw", lr=5e-3, anchors=64, eval_every=20)
    summary = train(cfg, RunFolder(tmp_path), True, Silent())
    assert summary["tau"] > cfg.drafter.block_size / 2
    assert summary["best_tau"] > 3.0


def test_a_time_limit_becomes_a_number_of_steps_that_is_kept(fresh: Path, tiny_target: Path) -> None:
    cfg = run_file(fresh, tiny_target, epochs=40, max_seconds=1e-3, eval_every=10_000)
    told = At(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(cfg, RunFolder(fresh), True, told)
    state = load_checkpoint(RunFolder(fresh).train() / "last").state
    assert (state.planned, state.num_steps) == (True, 3)
    assert any("3 steps fit" in note for note in told.notes)
    again = At(0, lambda: None)
    assert train(cfg, RunFolder(fresh), True, again)["num_steps"] == 3
    assert not any("steps fit" in note for note in again.notes)


def test_a_generous_time_limit_leaves_the_plan_as_it_is(
    fresh: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.train.loop.MEASURED_STEPS", 4)
    summary = train(run_file(fresh, tiny_target, max_steps=6, max_seconds=1e6), RunFolder(fresh), True, Silent())
    assert summary["num_steps"] == 6
    assert load_checkpoint(RunFolder(fresh).train() / "last").state.planned


def test_before_the_limit_is_steps_the_rate_rises_as_that_of_a_short_run(
    fresh: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.train.loop.GUESSED_STEPS", 20)
    lengths: list[int] = []
    own = learning_rate

    def seen(step: int, num_steps: int, cfg: TrainConfig) -> float:
        lengths.append(num_steps)
        return own(step, num_steps, cfg)

    monkeypatch.setattr("headrace.train.loop.learning_rate", seen)
    cfg = run_file(fresh, tiny_target, epochs=4000, max_seconds=1e-3, eval_every=10_000)
    train(cfg, RunFolder(fresh), True, Silent())
    assert lengths == [20, 20, 3]


def test_without_held_out_rows_the_last_checkpoint_is_the_best(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target, num_samples=6, num_heldout=0)
    summary = train(run_file(tmp_path, tiny_target), folder, True, Silent())
    assert summary["tau"] is None
    assert load_checkpoint(folder.train() / "best").state.step == summary["num_steps"]


def test_what_is_global_is_put_back(fresh: Path, tiny_target: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    train(run_file(fresh, tiny_target, max_steps=1, threads=2), RunFolder(fresh), True, Silent())
    assert (signal.getsignal(signal.SIGTERM), torch.get_num_threads()) == before
