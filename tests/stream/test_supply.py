from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.record import Record
from headrace.store.folder_source import FolderSource
from headrace.store.reader import DamagedRecord, StoredRecord, StoreReader
from headrace.store.writer import StoreWriter
from headrace.stream.supply import FolderSupply, Supply
from headrace.testing.states import fake_record, same_records
from tests.stream.filling import spoil
from tests.stream.serving import HOLE, make_store, positions


def folder_supply(root: Path, far: bool) -> FolderSupply:
    return FolderSupply(FolderSource(make_store(root), 2), far)


@pytest.mark.parametrize("far", [False, True])
def test_a_prefix_is_given_within_the_bytes_and_at_least_one_item(tmp_path: Path, far: bool) -> None:
    supply: Supply = folder_supply(tmp_path, far)
    asked = positions(1, HOLE, 2, 4, 7)
    (only,) = supply.take(asked, 1, 0.0)
    assert isinstance(only, StoredRecord)  # too large for what was asked: it is sent in parts, from the disk
    one = only.num_bytes
    for most, rows in ((1, [1]), (one, [1, HOLE]), (2 * one, [1, HOLE, 2]), (1 << 30, [1, HOLE, 2, 4, 7])):
        assert [item.row for item in supply.take(asked, most, 0.0)] == rows
    first, hole, *_ = supply.take(asked, one, 0.0)
    assert isinstance(first, Record if far else StoredRecord)
    assert same_records(first.record() if isinstance(first, StoredRecord) else first, fake_record(1, 1))
    assert hole == supply.holes()[HOLE]
    assert supply.failed is None
    assert supply.figures() == {}
    assert supply.manifest()["identity"]["prepared"] == "prepared-1"
    supply.commit("trainer", asked[1])
    assert [item.row for item in supply.take(asked, one, 0.0)] == [1, HOLE]
    supply.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_record_that_is_missing_is_told_when_it_comes_first(tmp_path: Path, far: bool) -> None:
    supply = folder_supply(tmp_path, far)
    assert [item.row for item in supply.take(positions(1, 99, 2), 1 << 30, 0.0)] == [1]
    with pytest.raises(StoreError, match="row 99"):
        supply.take(positions(99, 2), 1 << 30, 0.0)
    supply.close()


def test_what_turns_out_damaged_is_a_hole_then_or_an_older_record(tmp_path: Path) -> None:
    supply = folder_supply(tmp_path, False)
    spoil(tmp_path, 2)
    (position,) = positions(2)
    (first,) = supply.take([position], 1, 0.0)
    assert isinstance(first, StoredRecord)
    with pytest.raises(DamagedRecord) as caught:
        first.record()
    supply.damaged(position, caught.value)
    assert supply.take([position], 1, 0.0) == [supply.holes()[2]]
    supply.close()
    writer = StoreWriter(tmp_path, StoreReader(tmp_path).manifest, shard_bytes=1 << 30, shard_seconds=1e9)
    writer.forget(1)
    writer.add(fake_record(1, writer.generation))
    writer.seal()  # an older record stands in the journal until the writer ends
    again = FolderSupply(FolderSource(tmp_path, 2))
    spoil(tmp_path, 1)  # the newer one of two
    (position,) = positions(1)
    (newest,) = again.take([position], 1, 0.0)
    assert isinstance(newest, StoredRecord)
    with pytest.raises(DamagedRecord) as caught:
        newest.record()
    again.damaged(position, caught.value)
    (older,) = again.take([position], 1, 0.0)
    assert isinstance(older, Record)
    assert same_records(older, fake_record(1, 1))
    again.close()
    writer.close()
