from pathlib import Path

import pytest

from headrace.config import StoreConfig
from headrace.errors import StoreError
from headrace.order import is_kept
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.progress import Silent
from headrace.record import Record
from headrace.store.reader import DamagedRecord
from headrace.stream.kept import KeptRecords
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.stream.filling import spoil

NUM = 40


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedSet:
    samples = [fake_sample(row) for row in range(NUM)]
    write_prepared(
        tmp_path / "prepared",
        [Draft(s.id, s.input_ids, s.loss_mask, "kind", heldout=False) for s in samples],
        {"fingerprint": "prepared-1"},
    )
    return PreparedSet.open(tmp_path / "prepared")


def opened(prepared: PreparedSet, share: float = 1.0, **store: int) -> KeptRecords:
    states = prepared.folder.parent / "states"
    return KeptRecords(states, fake_manifest(), StoreConfig(**store), share, prepared, Silent())


def read(kept: KeptRecords, row: int, id: bytes) -> Record | None:
    """As a server does: what is damaged is told."""
    found = kept.find(row, id)
    try:
        return None if found is None else found.record()
    except DamagedRecord as exc:
        kept.damaged(row, exc)
        return None


def fill(kept: KeptRecords) -> None:
    for row in range(NUM):
        kept.add(fake_record(row, kept.generation))


def test_a_kept_record_is_read_back_at_once(prepared: PreparedSet) -> None:
    kept = opened(prepared)
    assert read(kept, 3, fake_sample(3).id) is None
    kept.add(fake_record(3, kept.generation))
    assert 3 in kept
    found = read(kept, 3, fake_sample(3).id)
    assert found is not None
    assert same_records(found, fake_record(3, kept.generation))
    assert not kept.wants(3)
    kept.close()


def test_only_the_subset_of_the_share_is_written(prepared: PreparedSet) -> None:
    kept = opened(prepared, 0.4)
    fill(kept)
    expected = [row for row in range(NUM) if is_kept(fake_sample(row).id, 0.4)]
    assert [row for row in range(NUM) if row in kept] == expected
    assert kept.num_records == len(expected)
    assert 0 < len(expected) < NUM
    kept.close()
    again = opened(prepared, 0.4)
    assert [row for row in range(NUM) if row in again] == expected
    again.close()


def test_what_the_folder_holds_is_read_whatever_the_share(prepared: PreparedSet) -> None:
    first = opened(prepared)
    fill(first)
    first.close()
    kept = opened(prepared, 0.0)
    assert all(read(kept, row, fake_sample(row).id) is not None for row in range(NUM))
    kept.close()


def test_a_damaged_record_is_missing_until_it_is_written_anew(prepared: PreparedSet) -> None:
    first = opened(prepared)
    fill(first)
    first.close()
    spoil(prepared.folder.parent / "states", 7)
    kept = opened(prepared)
    assert read(kept, 7, fake_sample(7).id) is None
    assert kept.num_damaged == 1
    assert 7 not in kept
    assert kept.wants(7)
    kept.add(fake_record(7, kept.generation))
    found = read(kept, 7, fake_sample(7).id)
    assert found is not None
    assert found.generation == kept.generation == 2
    kept.close()


def test_what_this_process_wrote_and_the_disk_spoiled_is_written_by_the_next(prepared: PreparedSet) -> None:
    kept = opened(prepared)
    fill(kept)
    assert read(kept, 0, fake_sample(0).id) is not None
    spoil(prepared.folder.parent / "states", 7)
    assert read(kept, 7, fake_sample(7).id) is None
    assert not kept.wants(7)
    kept.add(fake_record(7, kept.generation))
    assert read(kept, 7, fake_sample(7).id) is None
    kept.close()
    again = opened(prepared)
    assert read(again, 7, fake_sample(7).id) is None
    again.add(fake_record(7, again.generation))
    assert read(again, 7, fake_sample(7).id) is not None
    again.close()


def test_a_full_folder_keeps_what_it_has(prepared: PreparedSet) -> None:
    kept = opened(prepared, max_bytes=30_000)
    fill(kept)
    held = [row for row in range(NUM) if row in kept]
    assert 0 < len(held) < NUM
    assert all(read(kept, row, fake_sample(row).id) is not None for row in held)
    assert not any(kept.wants(row) for row in range(NUM))
    kept.close()


def test_a_hole_is_durable(prepared: PreparedSet) -> None:
    kept = opened(prepared)
    hole = kept.fail(5, "not finite")
    assert kept.holes() == {5: hole}
    kept.close()
    again = opened(prepared)
    assert again.holes() == {5: hole}
    again.close()


def test_another_writer_is_refused(prepared: PreparedSet) -> None:
    kept = opened(prepared)
    with pytest.raises(StoreError, match="only writer"):
        opened(prepared)
    kept.close()
