import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.capture.capture import capture, capture_taps, token_rule
from headrace.codec.spec import CodecSpec, short_spec
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, TargetError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.manifest import Manifest
from headrace.store.reader import StoreReader
from headrace.target.engine_target import open_engines
from headrace.target.transformers_target import TransformersTarget
from headrace.testing.fake_engine import CHUNK, FakeEngine
from tests.capture.conftest import LENGTHS, make_cfg, write_set
from tests.capture.test_capture import payloads
from tests.engines import TAPS, EngineProcess

BFLOAT16 = CodecSpec("raw", 0, 2, 32, "bfloat16")
QUICK = {"in_flight": 3, "timeout_s": 10.0, "retries": 3, "set_aside_s": 0.3}


@pytest.fixture
def engine_cfg(cfg: RunFile) -> RunFile:
    return with_engine(cfg)


def with_engine(cfg: RunFile, **changes: Any) -> RunFile:
    target = cfg.target.model_copy(update={"engine": "vllm"})
    return cfg.model_copy(update={"target": target, "engine": cfg.engine.model_copy(update={**QUICK, **changes})})


@contextlib.contextmanager
def engines(cfg: RunFile, *names: str, codec: CodecSpec = BFLOAT16, **options: Any) -> Iterator[list[FakeEngine]]:
    options = {"dtype": "bfloat16", **options}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(FakeEngine(Path(cfg.run) / "engines" / name, cfg.target.model, TAPS, codec, **options))
            for name in names
        ]


def alone(target: TransformersTarget, cfg: RunFile, input_ids: Any) -> torch.Tensor:
    """States of one sample in a pass of its own, as the fake engine runs it."""
    return target.states([input_ids], capture_taps(cfg, 5), len(input_ids))[0]


def test_every_row_is_stored_once_as_the_engines_encoded_it(
    engine_cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    with engines(engine_cfg, "a", "b"):
        opened = open_engines(engine_cfg, folder)
        assert opened.spec.__dict__ == {**target.spec.__dict__, "engine": "fake", "engine_version": "0"}
        summary = capture(engine_cfg, folder, opened, Silent())
        assert capture(engine_cfg, folder, open_engines(engine_cfg, folder), Silent()) == summary
    stored, prepared = payloads(folder), PreparedSet.open(folder.prepared)
    assert sorted(stored) == list(range(len(LENGTHS)))
    for row, payload in stored.items():
        states = alone(target, engine_cfg, prepared.sample(row).input_ids)
        assert payload == states.view(torch.uint8).numpy().tobytes()
    assert summary["num_failed"] == 0
    assert Manifest.read(folder.states).provenance["engine"] == "fake"
    lines = [json.loads(line) for line in (folder.states / "capture_metrics.jsonl").read_text().splitlines()]
    told = lines[-1]["engines"]
    assert sorted(told) == ["a", "b"]
    assert sum(one["num_tokens"] for one in told.values()) > sum(LENGTHS)
    assert sum(one["num_requests"] for one in told.values()) == len(LENGTHS) + 3, "one more for each window of five"
    assert lines[-1]["tokens_s"] > 0


def test_a_store_begun_by_one_engine_is_ended_by_another(
    engine_cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    with engines(engine_cfg, "a") as (one,):
        one.fault = "errors_500"
        with pytest.raises((CaptureError, TargetError)):
            capture(engine_cfg, folder, open_engines(engine_cfg, folder), Silent())
    tolerant = engine_cfg.model_copy(
        update={"capture": engine_cfg.capture.model_copy(update={"tolerate_failures": 1.0})}
    )
    assert capture(tolerant, folder, target, Silent())["num_records"] == len(LENGTHS)
    assert sorted(payloads(folder)) == list(range(len(LENGTHS)))


def test_a_codec_encodes_in_the_engine(engine_cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    cfg = engine_cfg.model_copy(update={"capture": engine_cfg.capture.model_copy(update={"codec": "rotated:8"})})
    spec = short_spec("rotated:8", 2, 32, "bfloat16")
    with engines(cfg, "a", codec=spec):
        summary = capture(cfg, folder, open_engines(cfg, folder), Silent())
    assert summary["num_records"] == len(LENGTHS)
    assert summary["bytes_raw"] > sum(map(len, payloads(folder).values()))


def test_states_that_the_engines_do_not_encode_come_raw_and_are_encoded_here(
    engine_cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    """So are the raw slice that a codec is fitted on, and a token rule that the engines know nothing of."""
    cfg = engine_cfg.model_copy(update={"capture": engine_cfg.capture.model_copy(update={"codec": "lossless"})})
    with engines(cfg, "a"):
        opened = open_engines(cfg, folder)
        assert not opened.encodes(short_spec("lossless", 2, 32, "bfloat16"), capture_taps(cfg, 5))
        assert capture(cfg, folder, opened, Silent())["num_records"] == len(LENGTHS)


def test_of_engines_states_only_the_needed_tokens_are_stored(
    engine_cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    """The engines encode with the run's codec, but know nothing of the rule."""
    own = engine_cfg.capture.model_copy(update={"tokens": "needed", "window": 6})
    cfg = engine_cfg.model_copy(update={"capture": own})
    with engines(cfg, "a", "b"):
        opened = open_engines(cfg, folder)
        assert opened.encodes(BFLOAT16, capture_taps(cfg, 5))
        capture(cfg, folder, opened, Silent())
    prepared, reader, num_shorter = PreparedSet.open(folder.prepared), StoreReader(folder.states), 0
    assert sorted(reader.rows.tolist()) == list(range(len(LENGTHS)))
    for row in range(len(LENGTHS)):
        sample = prepared.sample(row)
        start, end = token_rule(cfg, capture_taps(cfg, 5)).span(sample.loss_mask)
        states = alone(target, cfg, sample.input_ids)[start:end]
        payload = b"".join(segment.payload for segment in reader.read(row, sample.id).segments)
        assert payload == states.contiguous().view(torch.uint8).numpy().tobytes()
        num_shorter += len(states) < len(sample.input_ids)
    reader.close()
    assert num_shorter > len(LENGTHS) // 2


LONG = (40, 44, 50, 3, 41, 40, 47, 48)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("zero_rows", "all zero at token 1, after_block:0"),
        ("nan", "not finite at token"),
        ("duplicate_rows", "differ but have the same states"),
        ("chunk_lost", "rows of"),
        ("wrong_ids", "BOS"),
        ("queue_full", "the queue is full"),
        ("errors_500", "no memory left"),
    ],
)
def test_a_faulty_engine_stops_the_run_and_no_bad_record_is_stored(
    engine_cfg: RunFile, folder: RunFolder, fault: str, reason: str, tmp_path: Path
) -> None:
    lengthened = RunFolder(tmp_path / "long")
    write_set(lengthened.prepared, LONG, trained=True)
    cfg = with_engine(engine_cfg, in_flight=1, retries=1).model_copy(update={"run": str(lengthened.root)})
    with engines(cfg, "a", fault=fault), pytest.raises((CaptureError, TargetError), match=f"(?s){reason}"):
        capture(cfg, lengthened, open_engines(cfg, lengthened), Silent())
    assert set(payloads(lengthened)) <= {LONG.index(3)}, "shorter than a chunk: its states are right"


def test_what_an_engine_fails_in_passing_is_tried_by_the_next_capture(engine_cfg: RunFile, folder: RunFolder) -> None:
    tolerant = engine_cfg.model_copy(
        update={"capture": engine_cfg.capture.model_copy(update={"tolerate_failures": 0.5})}
    )
    once = with_engine(tolerant, in_flight=1, retries=0)
    with engines(once, "a", fault="queue_full", times=3):  # of a window's sample first
        assert capture(once, folder, open_engines(once, folder), Silent())["num_failed"] == 2
        failures = StoreReader(folder.states).failures
        assert not any(failure.permanent for failure in failures.values())
        assert capture(engine_cfg, folder, open_engines(engine_cfg, folder), Silent())["num_failed"] == 0


def test_bad_states_and_long_texts_fail_for_good(engine_cfg: RunFile, folder: RunFolder) -> None:
    cfg = with_engine(engine_cfg, in_flight=1).model_copy(
        update={"capture": engine_cfg.capture.model_copy(update={"tolerate_failures": 0.5})}
    )
    with engines(cfg, "a", max_model_len=16) as (one,):
        assert capture(cfg, folder, open_engines(cfg, folder), Silent())["num_failed"] == LENGTHS.count(16)
        failures = StoreReader(folder.states).failures
        assert {LENGTHS[row] for row in failures} == {16}
        assert all(failure.permanent for failure in failures.values())
        assert "16 and 1 to generate (expected at most 16 tokens" in failures[LENGTHS.index(16)].reason
        assert one.num_requests == len(LENGTHS) - LENGTHS.count(16) + 2, "of three windows one begins with such a text"


def test_one_fault_that_a_second_try_does_not_show_is_no_failure(engine_cfg: RunFile, folder: RunFolder) -> None:
    cfg = with_engine(engine_cfg, in_flight=1)
    with engines(cfg, "a", fault="nan") as (one,):
        asked = one.completion

        def heal(body: dict[str, Any]) -> Any:
            answer = asked(body)
            one.fault = ""
            return answer

        one.completion = heal  # type: ignore[method-assign]
        assert capture(cfg, folder, open_engines(cfg, folder), Silent())["num_failed"] == 0
    assert one.num_requests == len(LENGTHS) + 1 + 3, "one more, and one a window"


def test_an_engine_killed_and_restarted_in_the_middle_loses_and_doubles_nothing(
    tiny_folder: Path, tmp_path: Path, target: TransformersTarget
) -> None:
    lengths = [3 + n % 20 for n in range(120)]
    folder = RunFolder(tmp_path / "run")
    write_set(folder.prepared, lengths, trained=True)
    cfg = with_engine(make_cfg(tiny_folder, folder.root))
    children = [EngineProcess(folder.root / "engines" / name, tiny_folder, BFLOAT16, dtype="bfloat16") for name in "ab"]
    figures: list[dict[str, Any]] = []

    class Watched(Silent):
        def advance(self, done: int, **told: float | int | str) -> None:
            figures.append(told)
            if len(figures) == 40:
                children[0].kill()
            if len(figures) == 60:
                children[0].start()
                children[0].wait_until_healthy()
            if len(figures) > 60:
                time.sleep(0.02)  # so that the one that came back has work left

    try:
        for child in children:
            child.wait_until_healthy()
        summary = capture(cfg, folder, open_engines(cfg, folder), Watched())
    finally:
        for child in children:
            child.kill()
    assert (summary["num_records"], summary["num_failed"]) == (120, 0)
    stored, prepared = payloads(folder), PreparedSet.open(folder.prepared)
    assert sorted(stored) == list(range(120))
    for row in range(120):
        states = alone(target, cfg, np.asarray(prepared.sample(row).input_ids))
        assert stored[row] == states.view(torch.uint8).numpy().tobytes()
    assert figures[-1]["set_aside"] == 1
    assert int(figures[-1]["retries"]) >= 1
    assert not StoreReader(folder.states).failures
    told = json.loads((folder.states / "capture_metrics.jsonl").read_text().splitlines()[-1])["engines"]
    assert told["a"]["num_set_aside"] == 1
    assert sum(one["num_requests"] for one in told.values()) == 120 + 120 // 5


def test_the_capture_ends_when_all_engines_are_gone_and_goes_on_later(tiny_folder: Path, tmp_path: Path) -> None:
    lengths = [CHUNK] * 60
    folder = RunFolder(tmp_path / "run")
    write_set(folder.prepared, lengths, trained=True)
    cfg = with_engine(make_cfg(tiny_folder, folder.root))
    num_done = 0

    class Ending(Silent):
        def advance(self, done: int, **told: float | int | str) -> None:
            nonlocal num_done
            num_done += 1
            if num_done == 20:
                one.close()

    with engines(cfg, "a") as (one,), pytest.raises(TargetError, match="an engine that answers"):
        capture(cfg, folder, open_engines(cfg, folder), Ending())
    kept = sorted(payloads(folder))
    assert 20 <= len(kept) < 60
    with engines(cfg, "a"):
        assert capture(cfg, folder, open_engines(cfg, folder), Silent())["num_records"] == 60
    reader = StoreReader(folder.states)
    prepared = PreparedSet.open(folder.prepared)
    assert {reader.read(row, prepared.sample(row).id).generation for row in kept} == {1}, "none made again"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("off_by_one", "does not give the engine's own predictions"), ("other_tokens", "own predictions")],
)
def test_a_silent_fault_in_the_middle_is_stopped_by_the_sample_of_the_next_window(
    engine_cfg: RunFile, tmp_path: Path, fault: str, cause: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    write_set(folder.prepared, [12] * 40, trained=True)
    cfg = with_engine(engine_cfg, in_flight=1).model_copy(update={"run": str(folder.root)})
    with engines(cfg, "a") as (one,):

        class Spoiling(Silent):
            def advance(self, done: int, **told: float | int | str) -> None:
                if done >= 12 * 12:
                    one.fault = fault

        with pytest.raises(CaptureError, match=cause):
            capture(cfg, folder, open_engines(cfg, folder), Spoiling())
    assert 12 <= len(payloads(folder)) <= 20


def test_engines_of_another_model_or_codec_are_refused(engine_cfg: RunFile, folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="an engine under"):
        open_engines(engine_cfg, folder)
    other = short_spec("fp8", 2, 32, "bfloat16")
    with (
        engines(engine_cfg, "a"),
        engines(engine_cfg, "b", codec=other),
        pytest.raises(TargetError, match="engines with the same codec"),
    ):
        open_engines(engine_cfg, folder)
