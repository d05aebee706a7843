import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import StoreError
from headrace.record import Record
from headrace.store import journal
from headrace.store.journal import read_journal
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

LARGE = 1 << 30


def open_writer(root: Path, **changes) -> StoreWriter:
    return StoreWriter(root, fake_manifest(), **{"shard_bytes": LARGE, "shard_seconds": 1e9, **changes})


def shard_names(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "shards").iterdir())


def test_a_store_is_resumed_with_what_it_holds(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        assert (writer.generation, writer.committed, writer.notes) == (1, {}, [])
        writer.add(fake_record(4, 1))
        assert writer.committed == {}
        writer.seal()
        assert writer.committed == {4: (fake_sample(4).id, 1)}
    with open_writer(tmp_path) as writer:
        assert writer.generation == 2
        assert writer.committed == {4: (fake_sample(4).id, 1)}


def test_a_shard_is_sealed_when_it_is_full(tmp_path: Path) -> None:
    with open_writer(tmp_path, shard_bytes=4000) as writer:
        for row in range(6):
            writer.add(fake_record(row, 1))
        listed = [name for name in shard_names(tmp_path) if name.endswith(".arrow")]
        assert len(listed) == len(set(writer.committed)) // 2 >= 2


def test_a_shard_is_sealed_when_it_is_old(tmp_path: Path) -> None:
    now = [0.0]
    with open_writer(tmp_path, shard_seconds=60, clock=lambda: now[0]) as writer:
        writer.add(fake_record(0, 1))
        now[0] = 59.0
        writer.add(fake_record(1, 1))
        assert writer.committed == {}
        now[0] = 60.0
        writer.add(fake_record(2, 1))
        assert set(writer.committed) == {0, 1, 2}
        now[0] = 119.0
        writer.add(fake_record(3, 1))
        assert set(writer.committed) == {0, 1, 2}


def test_nothing_added_makes_no_shard(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.seal()
    assert shard_names(tmp_path) == []
    assert StoreReader(tmp_path).num_records == 0


def test_another_identity_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.add(fake_record(0, 1))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(StoreError, match="prepared 'other'"):
        StoreWriter(tmp_path, fake_manifest(prepared="other"), LARGE, 1e9)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"} == before
    open_writer(tmp_path).close()  # the lock was given up


def test_another_provenance_is_told(tmp_path: Path) -> None:
    open_writer(tmp_path).close()
    manifest = fake_manifest()
    changed = replace(manifest, provenance={**manifest.provenance, "engine_version": "7"})
    with StoreWriter(tmp_path, changed, LARGE, 1e9) as writer:
        assert writer.notes == ["provenance: engine_version was '0' and is now '7'"]


def test_shards_without_a_manifest_are_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.add(fake_record(0, 1))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        open_writer(tmp_path)


def test_two_writers_never_write_at_once(tmp_path: Path) -> None:
    with open_writer(tmp_path), pytest.raises(StoreError, match="only writer"):
        open_writer(tmp_path)


def broken_segment(record: Record, **changes) -> Record:
    return Record((*record.segments[:-1], replace(record.segments[-1], **changes)))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (fake_record(0, 2), "of generation 1"),
        (broken_segment(fake_record(0, 1, 3), token_start=5), "follow each other"),
        (broken_segment(fake_record(0, 1, 3), segment=1), "follow each other"),
        (broken_segment(fake_record(0, 1, 3), row=9), "follow each other"),
        (Record(fake_record(0, 1, 3).segments[:2]), "follow each other"),
        (broken_segment(fake_record(0, 1), payload=bytes(8 * 1024 * 1024 + 1)), "payload bytes"),
    ],
)
def test_a_record_that_is_not_whole_is_refused_and_the_writer_lives(tmp_path: Path, record, message) -> None:
    with open_writer(tmp_path) as writer:
        with pytest.raises(StoreError, match=message):
            writer.add(record)
        writer.add(fake_record(0, 1))
    assert StoreReader(tmp_path).num_records == 1


def test_a_row_is_taken_once_a_generation_and_keeps_its_id(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.add(fake_record(0, 1))
        with pytest.raises(StoreError, match="once a generation"):
            writer.add(fake_record(0, 1))
        writer.seal()
        with pytest.raises(StoreError, match="once a generation"):
            writer.add(fake_record(0, 1))
        with pytest.raises(StoreError, match="row 0 with id"):
            writer.add(fake_record(0, 1, seed=5))


def test_a_new_generation_supersedes_and_closing_compacts(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for row in range(3):
            writer.add(fake_record(row, 1, num_segments=2))
    with open_writer(tmp_path) as writer:
        writer.forget(1)
        assert set(writer.committed) == {0, 2}
        writer.add(fake_record(1, 2))
    rows = read_journal(tmp_path / journal.FILE_NAME)
    assert list(zip(rows["row"].tolist(), rows["generation"].tolist(), strict=True)) == [
        (0, 1),
        (0, 1),
        (2, 1),
        (2, 1),
        (1, 2),
    ]
    assert same_records(StoreReader(tmp_path).read(1, fake_sample(1).id), fake_record(1, 2))
    with open_writer(tmp_path) as writer:
        assert writer.committed[1][1] == 2


def test_failures_are_kept_over_openings(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.fail(fake_sample(7).id, 7, "constant states", permanent=True)
        assert writer.failed[7].reason == "constant states"
    with open_writer(tmp_path) as writer:
        assert (writer.failed[7].permanent, writer.failed[7].generation) == (True, 1)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_after_a_failed_write_nothing_more_is_written_and_all_is_kept(tmp_path, monkeypatch, call) -> None:
    writer = open_writer(tmp_path)
    writer.add(fake_record(0, 1))
    writer.seal()
    writer.add(fake_record(1, 1))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="Input/output error"):
            writer.seal()
    with pytest.raises(StoreError, match="a write failed"):
        writer.add(fake_record(2, 1))
    with pytest.raises(StoreError, match="a write failed"):
        writer.seal()
    writer.close()
    assert StoreReader(tmp_path).rows.tolist() == [0]
    with open_writer(tmp_path) as writer:
        assert set(writer.committed) == {0, 1}
        assert len(writer.notes) == 1


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.add(fake_record(0, 1))


def test_an_error_in_the_caller_still_seals_what_was_added(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_writer(tmp_path) as writer:
            writer.add(fake_record(0, 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert StoreReader(tmp_path).rows.tolist() == [0]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), shard_bytes=st.integers(1, 12_000), openings=st.integers(1, 3))
def test_whatever_is_added_in_whatever_order_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shard_bytes: int, openings: int
) -> None:
    root = tmp_path_factory.mktemp("store")
    rng = random.Random(seed)
    newest: dict[int, Record] = {}
    for _ in range(openings):
        with open_writer(root, shard_bytes=shard_bytes) as writer:
            for row in rng.sample(range(12), rng.randrange(8)):
                # A row keeps its content, so its number of tokens follows from the row.
                record = fake_record(row, writer.generation, rng.randrange(1, 4), num_tokens=row, seed=1)
                writer.add(record)
                newest[row] = record
    reader = StoreReader(root)
    assert reader.rows.tolist() == sorted(newest)
    assert np.sum([r.num_tokens for r in newest.values()]) == reader.num_tokens
    for row, record in newest.items():
        assert same_records(reader.read(row, record.id), record)
    reader.close()
