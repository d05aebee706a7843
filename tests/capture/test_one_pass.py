"""Answers and states by one request each: the store is that of two passes, and nothing is prefilled twice."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.capture.capture import capture
from headrace.capture.hypotheses import TOLERANCE, relative_error
from headrace.capture.one_pass import answered_sample
from headrace.capture.regenerate import ANSWERS, read_answers, regenerate
from headrace.capture.spool import spool_root
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError
from headrace.prepare.build import build_prepared
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.progress import Silent
from headrace.raw_slice import with_codec
from headrace.record import Sample, sample_id
from headrace.store.budget import StoreFull
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.target.base import Generated
from headrace.target.engine_target import open_engines
from tests.capture.conftest import LENGTHS, write_set
from tests.capture.test_engines import BFLOAT16, engines, with_engine
from tests.engines import EngineProcess


def changed(cfg: RunFile, **sections: dict[str, Any]) -> RunFile:
    """With other settings, held to the rules of a run file."""
    tree = cfg.model_dump()
    for name, values in sections.items():
        tree[name] |= values
    return RunFile.model_validate(tree)


@pytest.fixture
def one_pass(cfg: RunFile) -> RunFile:
    return changed(with_engine(cfg), capture={"tokens": "needed"}, regenerate={"with_states": True})


@pytest.fixture
def folder(one_pass: RunFile) -> RunFolder:
    folder = RunFolder(Path(one_pass.run))
    write_set(folder.prompts, LENGTHS, trained=False)
    return folder


def prepare(folder: RunFolder, drop: int = -1) -> None:
    """The prepared set as prepare makes it of the answers: by row, mixed, less one that it drops."""
    drafts = []
    for answer in sorted(read_answers(folder.answers / ANSWERS), key=lambda answer: -answer["row"]):
        ids = np.array([*answer["prompt_ids"], *answer["answer_ids"]], dtype=np.int32)
        mask = (np.arange(len(ids)) >= len(answer["prompt_ids"])).astype(np.uint8)
        if answer["row"] != drop:
            drafts.append(Draft(sample_id(ids, mask), ids, mask, "kind", heldout=bool(answer["heldout"])))
    write_prepared(folder.prepared, drafts, {"fingerprint": f"answers without {drop}"})


def spans(folder: RunFolder) -> dict[bytes, tuple[int, int, bytes]]:
    """By id: row, tokens, payload; each row with the ids and mask that the token rule keeps of the prepared set."""
    prepared, reader = PreparedSet.open(folder.prepared), StoreReader(folder.states)
    found = {}
    for row in reader.rows.tolist():
        sample = prepared.sample(row)
        record = reader.read(row, sample.id)
        assert np.array_equal(record.input_ids, sample.input_ids[: record.num_tokens])
        assert np.array_equal(record.loss_mask, sample.loss_mask[: record.num_tokens])
        assert sample.id not in found
        found[sample.id] = (row, record.num_tokens, b"".join(one.payload for one in record.segments))
    assert verify(folder.states) == []
    return found


def assert_same(mine: dict[bytes, Any], theirs: dict[bytes, Any]) -> None:
    """Rows, ids and tokens the same; states as near as those of any two passes: one of them had a token more."""
    assert {id: own[:2] for id, own in mine.items()} == {id: own[:2] for id, own in theirs.items()}
    for id, (_, num_tokens, payload) in mine.items():
        if num_tokens:
            own, other = (torch.frombuffer(bytearray(one), dtype=torch.bfloat16) for one in (payload, theirs[id][2]))
            assert relative_error(own, other) <= TOLERANCE["bfloat16"]


def two_passes(cfg: RunFile, folder: RunFolder, root: Path) -> dict[bytes, tuple[int, int, bytes]]:
    """The store of the same prepared set, captured by a pass of its own."""
    other = RunFolder(root)
    write_set(other.prompts, LENGTHS, trained=False)
    plain = changed(cfg, regenerate={"with_states": False}, engine={"folders": [f"{cfg.run}/engines/a"]})
    regenerate(plain, other, open_engines(plain, other), Silent())
    assert not spool_root(other).exists()
    assert (other.answers / ANSWERS).read_bytes() == (folder.answers / ANSWERS).read_bytes()
    prepare(other)
    capture(plain, other, open_engines(plain, other), Silent())
    return spans(other)


def test_the_store_is_that_of_two_passes_and_no_text_is_run_twice(
    one_pass: RunFile, folder: RunFolder, tmp_path: Path
) -> None:
    with engines(one_pass, "a") as (one,):
        summary = regenerate(one_pass, folder, open_engines(one_pass, folder), Silent())
        assert summary["num_answers"] == len(LENGTHS)
        prepare(folder)
        told: list[str] = []

        class Told(Silent):
            def note(self, message: str) -> None:
                told.append(message)

        captured = capture(one_pass, folder, open_engines(one_pass, folder), Told())
        assert one.num_requests == len(LENGTHS), "one request for answer and states, none by the capture"
        assert f"states: {len(LENGTHS)} came with the answers, 0 are to be captured" in told
        assert (captured["num_records"], captured["num_failed"]) == (len(LENGTHS), 0)
        assert not spool_root(folder).exists(), "taken, and removed"
        mine, theirs = spans(folder), two_passes(one_pass, folder, tmp_path / "two")
    assert_same(mine, theirs)


def test_what_was_dropped_is_not_taken_and_what_is_damaged_or_changed_is_captured(
    one_pass: RunFile, folder: RunFolder
) -> None:
    with engines(one_pass, "a") as (one,):
        opened = open_engines(one_pass, folder)
        regenerate(one_pass, folder, opened, Silent())
        prepare(folder, drop=3)
        (shard,) = (spool_root(folder) / "shards").glob("*.arrow")
        content = bytearray(shard.read_bytes())
        content[len(content) // 3] ^= 1
        shard.write_bytes(content)
        before = one.num_requests
        assert capture(one_pass, folder, opened, Silent())["num_records"] == len(LENGTHS) - 1
        assert one.num_requests - before == 1, "of the damaged record alone"
        assert len(spans(folder)) == len(LENGTHS) - 1
        assert (folder.answers / ANSWERS).exists()
        assert not spool_root(folder).exists()
        assert capture(one_pass, folder, opened, Silent())["num_records"] == len(LENGTHS) - 1
        assert one.num_requests - before == 1


SCRIPT = """
    import sys
    from pathlib import Path
    import headrace.capture.one_pass as room
    from headrace.capture.regenerate import regenerate
    from headrace.capture.capture import capture
    from headrace.config import RunFile, RunFolder
    from headrace.progress import Silent
    from headrace.target.engine_target import open_engines
    import headrace.capture.regenerate as answers

    cfg = RunFile.model_validate_json(sys.stdin.read())
    answers.CHUNK_BATCHES = 2

    class Told(Silent):
        def advance(self, done, **figures):
            print(done, flush=True)
            if done >= int(sys.argv[2]):
                import time
                time.sleep(60)

    folder = RunFolder(Path(cfg.run))
    work = {"regenerate": regenerate, "capture": capture}[sys.argv[1]]
    work(cfg, folder, open_engines(cfg, folder), Told())
"""


def killed(cfg: RunFile, work: str, at: int) -> None:
    """Do one stage in a process of its own, killed when so much is done."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), work, str(at)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(cfg.model_dump_json())
        process.stdin.close()
        for line in process.stdout:
            if int(line) >= at:
                break
        else:
            raise AssertionError("it ended by itself")
        process.send_signal(signal.SIGKILL)


def test_kills_of_client_and_engine_lose_and_double_nothing(
    one_pass: RunFile, folder: RunFolder, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = changed(one_pass, store={"shard_bytes": 3000}, engine={"in_flight": 2})
    child = EngineProcess(folder.root / "engines" / "a", tiny_folder, BFLOAT16, dtype="bfloat16")
    try:
        child.wait_until_healthy()
        killed(cfg, "regenerate", 6)
        monkeypatch.setattr("headrace.capture.regenerate.CHUNK_BATCHES", 2)
        answered = len(list(read_answers(folder.answers / ANSWERS)))
        assert 0 < answered < len(LENGTHS)
        child.kill()
        child.start()
        child.wait_until_healthy()
        regenerate(cfg, folder, open_engines(cfg, folder), Silent())
        prepare(folder)
        lengths = PreparedSet.open(folder.prepared).lengths
        killed(cfg, "capture", int(lengths.sum()) // 3)
        assert spool_root(folder).exists(), "not before the capture is done"
        assert capture(cfg, folder, open_engines(cfg, folder), Silent())["num_records"] == len(LENGTHS)
        assert not spool_root(folder).exists()
        assert_same(spans(folder), two_passes(cfg, folder, tmp_path / "two"))
    finally:
        child.kill()


def test_states_that_are_bad_twice_are_left_to_the_capture_and_the_answer_is_kept(
    one_pass: RunFile, folder: RunFolder
) -> None:
    alone = changed(one_pass, engine={"in_flight": 1})
    told: list[str] = []

    class Told(Silent):
        def note(self, message: str) -> None:
            told.append(message)

    with engines(alone, "a", fault="nan") as (one,):
        opened = open_engines(alone, folder)
        spoilt, asked = one._spoilt, []

        def first_text_only(ids: list[int], fresh: bool) -> torch.Tensor:
            asked.append(ids)
            one.fault = "nan" if ids == asked[0] else ""
            return spoilt(ids, fresh)

        one._spoilt = first_text_only  # type: ignore[method-assign]
        assert regenerate(alone, folder, opened, Told())["num_answers"] == len(LENGTHS)
        assert len([ids for ids in asked if ids == asked[0]]) == 2
        assert len([line for line in told if "its states are left to the capture: not finite" in line]) == 1
        prepare(folder)
        one._spoilt, before = spoilt, one.num_requests  # type: ignore[method-assign]
        one.fault = ""
        assert capture(alone, folder, opened, Silent())["num_failed"] == 0
        assert one.num_requests - before == 1


@pytest.mark.parametrize("fault", ["off_by_one", "other_tokens"])
def test_a_silent_fault_ends_the_regeneration(one_pass: RunFile, folder: RunFolder, fault: str) -> None:
    with engines(one_pass, "a", fault=fault), pytest.raises(CaptureError, match="own predictions"):
        regenerate(one_pass, folder, open_engines(one_pass, folder), Silent())


def test_rows_of_the_answer_that_are_not_its_own_end_the_regeneration(one_pass: RunFile, folder: RunFolder) -> None:
    with engines(one_pass, "a") as (one,):
        spoilt = one._spoilt
        prompts = [PreparedSet.open(folder.prompts).sample(row).input_ids.tolist() for row in range(len(LENGTHS))]

        def answer_backwards(ids: list[int], fresh: bool) -> torch.Tensor:
            states = spoilt(ids, fresh)
            size = max(len(prompt) for prompt in prompts if ids[: len(prompt)] == prompt)
            return torch.cat([states[:size], states[size:].flip(0)])

        one._spoilt = answer_backwards  # type: ignore[method-assign]
        with pytest.raises(CaptureError, match=r"own predictions.*the answer's own tokens .* below"):
            regenerate(one_pass, folder, open_engines(one_pass, folder), Silent())


def test_states_of_an_answer_that_a_kill_took_are_superseded_by_those_of_the_next(
    one_pass: RunFile, folder: RunFolder
) -> None:
    """A kill after the states are durable and before the answers are: sampled again, they may be others."""
    first = changed(one_pass, regenerate={"temperature": 1.5, "seed": 1})
    again = changed(one_pass, regenerate={"temperature": 1.5, "seed": 900})
    with engines(one_pass, "a") as (one,):
        opened = open_engines(one_pass, folder)
        regenerate(first, folder, opened, Silent())
        before = (folder.answers / ANSWERS).read_bytes()
        for name in (ANSWERS, "stage.json"):
            (folder.answers / name).unlink()
        regenerate(again, folder, opened, Silent())
        assert (folder.answers / ANSWERS).read_bytes() != before
        prepare(folder)
        num_requests = one.num_requests
        assert capture(again, folder, opened, Silent())["num_records"] == len(LENGTHS)
        assert one.num_requests == num_requests
    assert len(spans(folder)) == len(LENGTHS)


def test_a_latent_that_is_yet_to_be_fitted_waits_raw_where_there_is_room(one_pass: RunFile, folder: RunFolder) -> None:
    latent = changed(one_pass, capture={"codec": "latent:8x8", "fit_tokens": 60})
    small = changed(latent, store={"max_bytes": 5000})
    with engines(latent, "a") as (one,):
        opened = open_engines(latent, folder)
        with pytest.raises(StoreFull, match=r"raw until capture\.codec latent:8x8 is fitted(?s:.*)fit it first"):
            regenerate(small, folder, opened, Silent())
        regenerate(latent, folder, opened, Silent())
        prepare(folder)
        fitted = with_codec(latent, folder, lambda: opened, Silent())
        assert spool_root(folder).exists(), "lent to the slice that the codec was fitted on"
        assert capture(fitted, folder, opened, Silent())["num_records"] == len(LENGTHS)
        assert one.num_requests == len(LENGTHS)
    reader = StoreReader(folder.states)
    assert reader.manifest.codec.name == "latent"
    assert reader.manifest.token_rule == "context"


def test_the_samples_are_those_that_prepare_makes(one_pass: RunFile, folder: RunFolder, tiny_folder: Path) -> None:
    with engines(one_pass, "a"):
        regenerate(one_pass, folder, open_engines(one_pass, folder), Silent())
    build_prepared(one_pass, folder, tiny_folder, Silent(), folder.answers / ANSWERS)
    made, kept = set(PreparedSet.open(folder.prepared).ids()), StoreReader(spool_root(folder))
    assert len(made) > len(LENGTHS) // 2
    assert made <= {kept.id_of(row) for row in kept.rows.tolist()}


def test_an_answer_follows_its_prompt_and_is_what_is_trained() -> None:
    ids = np.array([5, 6, 7], dtype=np.int32)
    prompt = Sample(2, b"", ids, np.zeros(3, np.uint8))
    made = answered_sample(prompt, Generated((8, 9), "stop"))
    assert made.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert made.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert made.id == sample_id(made.input_ids, made.loss_mask)
