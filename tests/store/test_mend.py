from pathlib import Path

import pytest

from headrace.store import journal
from headrace.store.journal import HEADER, ROW_BYTES, read_journal
from headrace.store.mend import copy_intact, mend
from headrace.store.reader import StoreReader
from headrace.store.shard import ShardWriter, open_path, read_sidecar, read_trailer, shard_name, sidecar_path
from headrace.testing.states import fake_record, fake_sample, same_records


def leave_open_shard(root: Path, rows: list[int], generation: int = 2) -> Path:
    """What a writer of `generation` leaves when it is killed in the middle of its first shard."""
    path = root / "shards" / shard_name(generation, 0)
    writer = ShardWriter(path, {})
    for row in rows:
        for segment in fake_record(row, generation, num_segments=2).segments:
            writer.add(segment)
    writer.close()
    return path


def files(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "shards").iterdir())


def test_a_sound_store_is_left_alone(make_store) -> None:
    root = make_store(4)
    before = (root / journal.FILE_NAME).stat().st_mtime_ns
    mended = mend(root)
    assert (mended.notes, mended.last_generation, len(mended.rows)) == ((), 1, 8)
    assert (root / journal.FILE_NAME).stat().st_mtime_ns == before


def test_records_of_an_open_shard_are_kept(make_store) -> None:
    root = make_store(2)
    leave_open_shard(root, [10, 11])
    mended = mend(root)
    assert mended.last_generation == 2
    assert "2 records" in mended.notes[0]
    assert files(root) == [shard_name(1, 0), shard_name(2, 0)]
    record = StoreReader(root).read(11, fake_sample(11).id)
    assert same_records(record, fake_record(11, 2, num_segments=2))
    assert mend(root).notes == ()


def test_an_open_shard_cut_anywhere_gives_its_whole_records(make_store) -> None:
    root = make_store(2)
    opened = open_path(leave_open_shard(root, [10, 11, 12]))
    content = opened.read_bytes()
    sidecar = sidecar_path(root / "shards" / shard_name(2, 0))
    index, sidecar_bytes = read_sidecar(sidecar), sidecar.read_bytes()
    ends = [int(r["offset"] + r["length"]) for r in index]
    for size in sorted({0, 100, *(e + d for e in ends for d in (-1, 0))}):
        opened.write_bytes(content[:size])
        sidecar.write_bytes(sidecar_bytes)
        mend(root)
        expected = [0, 1, *[10 + k for k in range(3) if ends[2 * k + 1] <= size]]
        assert StoreReader(root).rows.tolist() == expected
        (root / "shards" / shard_name(2, 0)).unlink(missing_ok=True)
        mend(root)


def test_a_flip_in_an_open_shard_costs_one_record(make_store) -> None:
    root = make_store(2)
    path = leave_open_shard(root, [10, 11, 12])
    middle = read_sidecar(sidecar_path(path))[3]
    content = bytearray(open_path(path).read_bytes())
    content[int(middle["offset"]) + 77] ^= 16
    open_path(path).write_bytes(content)
    mend(root)
    assert StoreReader(root).rows.tolist() == [0, 1, 10, 12]
    read_trailer(path)


def test_an_open_shard_with_nothing_intact_leaves_nothing(make_store) -> None:
    root = make_store(2)
    path = leave_open_shard(root, [10])
    sidecar_path(path).unlink()
    mend(root)
    assert files(root) == [shard_name(1, 0)]


def test_a_shard_sealed_but_not_in_the_journal_is_indexed(make_store) -> None:
    root = make_store(6)
    path = root / journal.FILE_NAME
    content = path.read_bytes()
    for size in (0, 5, len(HEADER), len(HEADER) + ROW_BYTES, len(content) - ROW_BYTES, len(content) - 1):
        path.write_bytes(content[:size])
        mend(root)
        assert StoreReader(root).rows.tolist() == list(range(6))
    path.unlink()
    mend(root)
    assert StoreReader(root).rows.tolist() == list(range(6))


@pytest.mark.parametrize("position", [3, 30, 200])
def test_a_damaged_journal_is_made_anew_from_the_shards(make_store, position: int) -> None:
    root = make_store(6)
    path = root / journal.FILE_NAME
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert mend(root).notes
    assert StoreReader(root).rows.tolist() == list(range(6))


def test_rows_of_a_shard_that_is_gone_count_as_missing(make_store) -> None:
    root = make_store(6)
    (root / "shards" / shard_name(1, 1)).unlink()
    mended = mend(root)
    assert shard_name(1, 1) in mended.notes[0]
    assert StoreReader(root).rows.tolist() == [0, 1, 4, 5]
    assert len(read_journal(root / journal.FILE_NAME)) == len(mended.rows)


def test_what_a_kill_left_between_two_renames_is_cleared(make_store) -> None:
    root = make_store(2)
    name = shard_name(2, 0)
    for leftover in (f"{name}.tmp", f"{name}.tmp.open", f"{name}.tmp.open.index", f"{name}.open.index"):
        (root / "shards" / leftover).write_bytes(b"torn")
    (root / "shards" / f"{shard_name(1, 0)}.open").write_bytes(b"its salvaged twin is there already")
    mend(root)
    assert files(root) == [shard_name(1, 0)]
    assert StoreReader(root).rows.tolist() == [0, 1]


def test_copying_keeps_only_whole_records(make_store) -> None:
    root = make_store(2)
    source = root / "shards" / shard_name(1, 0)
    rows = read_trailer(source)[1:]  # the first of row 0's three segments is left out
    assert copy_intact(source, rows, root / "copy.arrow") == 1
    assert read_trailer(root / "copy.arrow")["row"].tolist() == [1]
