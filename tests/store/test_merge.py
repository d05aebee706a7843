from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.merge import merge
from headrace.store.reader import StoreReader
from headrace.store.shard import read_trailer
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample


def make(root: Path, *rows: int, openings: int = 1, seed: int = 0, **changes) -> Path:
    for _ in range(openings - 1):
        StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9).close()
        with StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9) as writer:
            writer.add(fake_record(99, writer.generation))
    with StoreWriter(root, fake_manifest(**changes), 1 << 30, 1e9) as writer:
        for row in rows:
            writer.add(fake_record(row, writer.generation, num_segments=2, seed=seed))
    return root


def payload(root: Path, row: int) -> bytes:
    record = StoreReader(root).read(row, fake_sample(row).id)
    return b"".join(segment.payload for segment in record.segments)


def of(row: int, generation: int) -> bytes:
    return b"".join(segment.payload for segment in fake_record(row, generation, num_segments=2).segments)


def damage(root: Path, row: int) -> None:
    (shard,) = (root / "shards").glob("*.arrow")
    index = read_trailer(shard)
    content = bytearray(shard.read_bytes())
    content[int(index["offset"][index["row"] == row][0]) + 400] ^= 1
    shard.write_bytes(content)


def test_every_row_comes_over_once_and_the_highest_generation_wins(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1, 2), make(tmp_path / "b", 2, 3, openings=2)
    seen: list[tuple[int, int]] = []
    done = merge([a, b], tmp_path / "out", 4000, 1e9, lambda *at: seen.append(at))
    assert (done.num_records, done.damaged) == (5, ())
    assert seen[-1] == (5, 5)
    assert StoreReader(tmp_path / "out").rows.tolist() == [0, 1, 2, 3, 99]
    assert payload(tmp_path / "out", 2) == of(2, 2)
    assert payload(tmp_path / "out", 1) == of(1, 1)
    assert verify(tmp_path / "out") == []


def test_a_merge_goes_on_where_it_was_left(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1), make(tmp_path / "b", 2, 3)
    merge([a], tmp_path / "out", 1 << 30, 1e9)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).num_records == 4
    assert StoreReader(tmp_path / "out").generations.tolist() == [1, 1, 2, 2]


def test_a_damaged_record_is_taken_from_elsewhere_or_told(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0, 1, 2), make(tmp_path / "b", 1)
    damage(a, 1)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).damaged == ()
    assert payload(tmp_path / "out", 1) == of(1, 1)
    damage(b, 1)
    done = merge([a, b], tmp_path / "again", 1 << 30, 1e9)
    assert (done.num_records, done.damaged) == (2, (1,))
    assert StoreReader(tmp_path / "again").rows.tolist() == [0, 2]


def test_failures_without_a_record_anywhere_come_over(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0), make(tmp_path / "b", 1)
    with StoreWriter(a, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.fail(fake_sample(1).id, 1, "not finite", permanent=True)
        writer.fail(fake_sample(7).id, 7, "not finite", permanent=True)
        writer.fail(fake_sample(8).id, 8, "time-out", permanent=False)
    assert merge([a, b], tmp_path / "out", 1 << 30, 1e9).num_failures == 1
    assert set(StoreReader(tmp_path / "out").failures) == {7}


def test_other_identities_other_ids_and_the_same_folder_are_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 0), make(tmp_path / "b", 1, prepared="other")
    with pytest.raises(StoreError, match="prepared 'other'"):
        merge([a, b], tmp_path / "out", 1 << 30, 1e9)
    with pytest.raises(StoreError, match="one id of row 0"):
        merge([a, make(tmp_path / "c", 0, seed=3)], tmp_path / "out", 1 << 30, 1e9)
    with pytest.raises(StoreError, match="another folder"):
        merge([a], tmp_path / "a", 1 << 30, 1e9)
