import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.capture.capture import capture, capture_taps
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, ConfigError
from headrace.files import Stage
from headrace.order import capture_groups
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.budget import StoreFull
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.taps import Tap
from headrace.target.transformers_target import TransformersTarget, load_target
from tests.capture.conftest import LENGTHS, make_cfg, write_set

Fault = Callable[[torch.Tensor], torch.Tensor]


class Faulty:
    """A target that spoils the states of one row, told apart by its length."""

    def __init__(self, inner: TransformersTarget, num_tokens: int, fault: Fault, times: int = 1000) -> None:
        self.spec = inner.spec
        self.generate = inner.generate
        self._inner, self._num_tokens, self._fault, self._times = inner, num_tokens, fault, times

    def states(
        self, ids: Sequence[npt.NDArray[np.int32]], taps: Sequence[Tap], padded_tokens: int
    ) -> list[torch.Tensor]:
        states = self._inner.states(ids, taps, padded_tokens)
        for n, own in enumerate(ids):
            if len(own) == self._num_tokens and self._times:
                self._times -= 1
                states[n] = self._fault(states[n])
        return states


def payloads(folder: RunFolder) -> dict[int, bytes]:
    """Payload of every row; each row must be there once, with the ids and mask of the prepared set."""
    prepared, reader = PreparedSet.open(folder.prepared), StoreReader(folder.states)
    found = {}
    for row in reader.rows.tolist():
        sample = prepared.sample(row)
        record = reader.read(row, sample.id)
        assert np.array_equal(record.input_ids, sample.input_ids)
        assert np.array_equal(record.loss_mask, sample.loss_mask)
        assert row not in found
        found[row] = b"".join(segment.payload for segment in record.segments)
    reader.close()
    return found


def test_every_row_is_stored_once_with_the_states_of_its_group(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    summary = capture(cfg, folder, target, Silent())
    prepared, stored = PreparedSet.open(folder.prepared), payloads(folder)
    assert sorted(stored) == list(range(len(LENGTHS)))
    taps = capture_taps(cfg, 5)
    for group in capture_groups(prepared.lengths, 5, 40):
        states = target.states([prepared.sample(row).input_ids for row in group.rows], taps, group.padded_tokens)
        for row, own in zip(group.rows, states, strict=True):
            assert stored[row] == own.view(torch.uint8).numpy().tobytes()
    assert summary["num_records"] == len(LENGTHS)
    assert summary["num_failed"] == 0
    assert summary["num_tokens"] == sum(LENGTHS)
    assert summary["bytes_raw"] == sum(LENGTHS) * 2 * 32 * 2 < summary["bytes_stored"]
    assert summary["taps"] == ["after_block:0", "after_block:2"]


def test_captured_states_are_kept(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    first = capture(cfg, folder, target, Silent())
    before = sorted((folder.states / "shards").iterdir())
    assert capture(cfg, folder, target, Silent()) == first
    assert sorted((folder.states / "shards").iterdir()) == before


def test_a_lost_record_comes_back_bit_for_bit(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    one_a_shard = cfg.model_copy(update={"store": cfg.store.model_copy(update={"shard_bytes": 1})})
    capture(one_a_shard, folder, target, Silent())
    whole = payloads(folder)
    state = StoreWriter.__init__

    def forgetful(self: StoreWriter, *args: Any, **kwargs: Any) -> None:
        state(self, *args, **kwargs)
        self.forget(3)
        self.forget(8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "__init__", forgetful)
        capture(one_a_shard, folder, target, Silent())
    assert payloads(folder) == whole
    reader = StoreReader(folder.states)
    prepared = PreparedSet.open(folder.prepared)
    newer = [row for row in whole if reader.read(row, prepared.sample(row).id).generation > 1]
    assert len(newer) == 2
    reader.close()


SCRIPT = """
    import sys, time
    from pathlib import Path
    import torch
    from headrace.capture import capture as room
    from headrace.config import RunFolder
    from headrace.progress import Silent
    from headrace.target.transformers_target import load_target
    from tests.capture.conftest import make_cfg

    torch.set_num_threads(1)
    cfg = make_cfg(Path(sys.argv[1]), Path(sys.argv[2]))
    cfg = cfg.model_copy(update={"store": cfg.store.model_copy(update={"shard_bytes": 2000})})

    class Slow(Silent):
        def advance(self, done, **figures):
            print(done, flush=True)
            time.sleep(0.2)

    room.capture(cfg, RunFolder(Path(cfg.run)), load_target(cfg.target), Slow())
"""


def test_a_killed_capture_resumes_and_ends_with_every_row_once(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, tiny_folder: Path, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tiny_folder), cfg.run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not json.loads((folder.states / "stage.json").read_text())["finished"]
    kept = len(StoreReader(folder.states).rows)
    assert kept < len(LENGTHS)
    capture(cfg, folder, target, Silent())
    undisturbed = RunFolder(tmp_path / "undisturbed")
    write_set(undisturbed.prepared, LENGTHS, trained=True)
    capture(make_cfg(tiny_folder, undisturbed.root), undisturbed, target, Silent())
    assert payloads(folder) == payloads(undisturbed)
    assert sorted(payloads(folder)) == list(range(len(LENGTHS)))


def spoil(place: Any, value: float) -> Fault:
    def fault(states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[place] = value
        return states

    return fault


FAULTS: dict[str, tuple[Fault, str]] = {
    "nan": (spoil((1, 0, 5), float("nan")), "not finite at token 1, after_block:0"),
    "zero": (spoil((slice(None), 1), 0.0), "all zero at token 0, after_block:2"),
    "constant": (spoil(slice(None), 1.0), "all 1 at token 0, after_block:0"),
    "length": (lambda states: states[:-1], "for tokens, taps and width [7, 2, 32]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_record_becomes_a_failure_not_states(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, name: str
) -> None:
    fault, reason = FAULTS[name]
    tolerant = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"tolerate_failures": 0.2})})
    summary = capture(tolerant, folder, Faulty(target, 7, fault), Silent())
    row = LENGTHS.index(7)
    assert summary["num_failed"] == 1
    assert sorted(payloads(folder)) == sorted(set(range(len(LENGTHS))) - {row})
    failure = StoreReader(folder.states).failures[row]
    assert failure.permanent
    assert reason in failure.reason
    assert capture(tolerant, folder, target, Silent()) == summary, "a failure for good is not tried again"


def test_a_fault_that_goes_away_is_no_failure(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    once = Faulty(target, 7, FAULTS["nan"][0], times=1)
    assert capture(cfg, folder, once, Silent())["num_failed"] == 0


def test_too_many_failures_stop_the_capture_and_keep_what_is_good(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    with pytest.raises(CaptureError, match=r"at most 1\.0% of 12 samples.*row 2: not finite"):
        capture(cfg, folder, Faulty(target, 7, FAULTS["nan"][0]), Silent())
    assert Stage(folder.states, "capture", {}).folder.joinpath("stage.json").exists()
    with pytest.raises(CaptureError, match="row 2"):
        capture(cfg, folder, target, Silent())
    tolerant = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"tolerate_failures": 0.1})})
    assert capture(tolerant, folder, target, Silent())["num_records"] == len(LENGTHS) - 1


def test_a_target_that_loses_samples_is_stopped(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    short = Faulty(target, 0, lambda s: s)
    whole = short.states
    short.states = lambda *a: whole(*a)[1:]  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="states of"):
        capture(cfg, folder, short, Silent())


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("target", {"taps": ["after_block:0", "after_block:1"]}, "taps"),
        ("capture", {"group_tokens": 41}, "capture.group_tokens"),
        ("order", {"window_samples": 4}, "order.window_samples"),
    ],
)
def test_another_identity_is_refused_and_named(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, section: str, changes: dict[str, Any], named: str
) -> None:
    capture(cfg, folder, target, Silent())
    changed = getattr(cfg, section).model_copy(update=changes)
    with pytest.raises(ConfigError, match=named):
        capture(cfg.model_copy(update={section: changed}), folder, target, Silent())


def test_default_taps_follow_the_rule() -> None:
    assert [str(tap) for tap in capture_taps(RunFile(), 30)] == [f"after_block:{n}" for n in (1, 8, 14, 20, 27)]


def test_progress_counts_what_the_store_holds(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    told: list[tuple[str, int]] = []

    class Told(Silent):
        def start(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
            told.append((f"{what} {total} {unit}", done))

        def advance(self, done: int, **figures: float | int | str) -> None:
            told.append((" ".join(sorted(figures)), done))

    started = time.monotonic()
    summary = capture(cfg, folder, target, Told())
    assert told[0] == (f"capture {sum(LENGTHS)} tokens", 0)
    assert told[-1] == ("MB tokens_s", sum(LENGTHS))
    assert 0 < summary["seconds"] <= time.monotonic() - started


def test_states_are_stored_in_bfloat16_whatever_a_target_of_any_dtype_runs_in(
    cfg: RunFile, folder: RunFolder, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.target.device.fast_bfloat16", lambda device: False)
    auto = cfg.model_copy(update={"target": cfg.target.model_copy(update={"dtype": "auto"})})
    exact = load_target(auto.target)
    assert exact.spec.dtype == "float32"
    summary = capture(auto, folder, exact, Silent())
    assert summary["bytes_raw"] == sum(LENGTHS) * 2 * exact.spec.hidden_size * 2
    prepared, taps = PreparedSet.open(folder.prepared), capture_taps(cfg, 5)
    group = capture_groups(prepared.lengths, 5, 40)[0]
    states = exact.states([prepared.sample(row).input_ids for row in group.rows], taps, group.padded_tokens)
    stored = payloads(folder)
    for row, own in zip(group.rows, states, strict=True):
        assert stored[row] == own.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_a_state_beyond_float16_is_a_failure_not_an_infinity(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    def loud(states: torch.Tensor) -> torch.Tensor:
        return torch.full_like(states, 1e6)

    narrow = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"dtype": "float16"})})
    with pytest.raises(CaptureError, match="not finite"):
        capture(narrow, folder, Faulty(target, 7, loud), Silent())


def test_the_last_state_is_stored_beside_the_taps_when_asked_for(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    asked = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"final_state": True})})
    assert [str(tap) for tap in capture_taps(asked, 5)] == ["after_block:0", "after_block:2", "final:pre_norm"]
    summary = capture(asked, folder, target, Silent())
    assert summary["bytes_raw"] == sum(LENGTHS) * 3 * target.spec.hidden_size * 2


def with_budget(cfg: RunFile, max_bytes: int) -> RunFile:
    return cfg.model_copy(update={"store": cfg.store.model_copy(update={"max_bytes": max_bytes})})


def test_what_cannot_fit_is_refused_before_the_target_runs(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the target ran")

    with pytest.raises(StoreFull, match=r"store\.max_bytes 9,000"):
        capture(with_budget(cfg, 9_000), folder, Faulty(target, 7, never), Silent())


def test_a_budget_that_runs_out_says_what_is_missing_and_capture_goes_on(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.capture.expected_bytes", lambda *_: 1)  # a codec that promised too much
    with pytest.raises(StoreFull, match=r"of 12 samples are missing: [0-9]+ tokens"):
        capture(with_budget(cfg, 12_000), folder, target, Silent())
    reader = StoreReader(folder.states)
    assert 0 < reader.num_records < len(LENGTHS)
    assert verify(folder.states) == []
    capture(cfg, folder, target, Silent())
    assert sorted(payloads(folder)) == list(range(len(LENGTHS)))
