import threading
import time
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.record import Record
from headrace.source import Hole, Position, Source
from headrace.store import folder_source
from headrace.store.folder_source import FolderSource
from headrace.store.reader import StoreReader
from headrace.store.shard import read_trailer, shard_name
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample


def positions(*rows: int) -> list[Position]:
    return [Position(0, place, row, fake_sample(row).id) for place, row in enumerate(rows)]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("read_ahead", [1, 3, 100])
def test_records_come_in_the_order_asked(make_store, read_ahead: int, num_threads: int) -> None:
    source: Source = FolderSource(make_store(8), read_ahead, num_threads)
    rows = [5, 0, 7, 7, 3, 1, 6, 2, 4, 0]
    assert [item.row for item in source.records(positions(*rows))] == rows
    assert list(source.records([])) == []
    assert source.manifest()["identity"]["prepared"] == "prepared-1"
    source.commit(positions(0)[0])
    source.close()
    source.close()


def test_order_holds_when_reads_take_uneven_time(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StoreReader.read

    def uneven(self: StoreReader, row: int, id: bytes) -> Record:
        time.sleep(0.02 if row % 2 else 0)
        return real(self, row, id)

    monkeypatch.setattr(StoreReader, "read", uneven)
    source = FolderSource(make_store(8), 4, 4)
    assert [item.row for item in source.records(positions(*range(8)))] == list(range(8))
    source.close()


def test_a_failed_row_is_a_hole_and_a_passing_failure_is_not(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.add(fake_record(0, 1))
        writer.fail(fake_sample(1).id, 1, "states are not finite", permanent=True)
        writer.fail(fake_sample(2).id, 2, "time-out", permanent=False)
    source = FolderSource(tmp_path, 4)
    hole = Hole(1, fake_sample(1).id, "states are not finite")
    assert list(source.records(positions(1))) == [hole]
    assert source.holes() == {1: hole}
    with pytest.raises(StoreError, match="a record of row 2"):
        list(source.records(positions(2)))
    source.close()


def test_a_record_captured_after_all_fills_its_hole(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.fail(fake_sample(1).id, 1, "states are not finite", permanent=True)
        writer.add(fake_record(1, 1))
    source = FolderSource(tmp_path, 4)
    assert isinstance(next(iter(source.records(positions(1)))), Record)
    assert source.holes() == {}
    source.close()


def test_a_missing_record_is_an_error_at_its_own_position(make_store) -> None:
    source = FolderSource(make_store(3), 10)
    items = source.records(positions(0, 1, 9, 2))
    assert [next(items).row, next(items).row] == [0, 1]
    with pytest.raises(StoreError, match="row 9"):
        next(items)
    source.close()


def test_reading_ahead_is_bounded(make_store) -> None:
    source = FolderSource(make_store(6), read_ahead=3, num_threads=1)
    pulled: list[int] = []

    def watched():
        for position in positions(*[k % 6 for k in range(50)]):
            pulled.append(position.row)
            yield position

    items = source.records(watched())
    for taken in range(1, 20):
        next(items)
        assert len(pulled) == taken + 3
    items.close()
    source.close()


def test_closing_leaves_no_thread_behind(make_store) -> None:
    source = FolderSource(make_store(4), 8, 3)
    items = source.records(positions(0, 1, 2, 3, 0, 1, 2, 3))
    next(items)
    items.close()
    source.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-read")]


def test_a_bound_of_nothing_is_refused(make_store) -> None:
    with pytest.raises(StoreError, match="read_ahead"):
        FolderSource(make_store(1), 0)


def damage(root: Path, *rows: int) -> None:
    for row in rows:
        shard = root / "shards" / shard_name(1, row // 2)
        index = read_trailer(shard)
        content = bytearray(shard.read_bytes())
        content[int(index["offset"][index["row"] == row][0]) + 400] ^= 1
        shard.write_bytes(content)


def test_a_damaged_record_becomes_a_hole_that_stays_and_is_counted(make_store, monkeypatch) -> None:
    root = make_store(8)
    damage(root, 3, 4)
    source = FolderSource(root, 2)
    assert source.holes() == {}
    items = list(source.records(positions(*range(8))))
    assert [item.row for item in items] == list(range(8))
    assert [item.row for item in items if isinstance(item, Hole)] == [3, 4]
    assert sorted(source.damaged) == sorted(source.holes()) == [3, 4]
    assert shard_name(1, 1) in source.damaged[3]
    assert source.holes()[3].reason == f"damaged: {source.damaged[3]}"
    monkeypatch.setattr(StoreReader, "read", None)  # known now: the disk is not asked again
    assert isinstance(next(iter(source.records(positions(3)))), Hole)
    source.close()


def test_more_than_a_few_damaged_records_stop_the_run(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_store(8)
    damage(root, 1, 3, 5)
    monkeypatch.setattr(folder_source, "DAMAGED_FEW", 2)
    source = FolderSource(root, 1, 1)
    with pytest.raises(StoreError, match="at most 1% of the records damaged"):
        list(source.records(positions(*range(8))))
    source.close()


def test_a_shard_that_is_gone_is_an_error_not_a_hole(make_store) -> None:
    root = make_store(4)
    (root / "shards" / shard_name(1, 1)).unlink()
    source = FolderSource(root, 1)
    with pytest.raises(StoreError, match="No such file"):
        list(source.records(positions(0, 1, 2)))
    assert source.holes() == {}
    source.close()
