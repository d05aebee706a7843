import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store import journal
from headrace.store import reader as reader_module
from headrace.store.reader import StoreReader
from headrace.store.shard import read_trailer, shard_name
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def expected(row: int, generation: int = 1):
    return fake_record(row, generation, num_segments=3 if row % 3 == 0 else 1)


def test_every_record_comes_back_bit_for_bit(make_store) -> None:
    reader = StoreReader(make_store(7))
    for row in random.Random(1).sample(range(7), 7):
        assert same_records(reader.read(row, fake_sample(row).id), expected(row))
    assert (reader.num_records, reader.num_tokens, reader.num_trained) == (7, 7 * 12, 7 * 6)
    assert reader.stored_bytes > 7 * 12 * 64
    assert reader.rows.tolist() == list(range(7))
    assert 3 in reader
    assert 7 not in reader


def test_a_missing_row_and_another_id_are_told_apart(make_store) -> None:
    reader = StoreReader(make_store(3))
    with pytest.raises(StoreError, match="a record of row 9"):
        reader.read(9, fake_sample(9).id)
    with pytest.raises(StoreError, match="row 1 with id"):
        reader.read(1, fake_sample(2).id)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << position % 8
    path.write_bytes(content)


def test_any_flip_inside_a_record_is_an_error_that_names_shard_and_offset(make_store) -> None:
    root = make_store(2)
    shard = root / "shards" / shard_name(1, 0)
    whole = shard.read_bytes()
    segment = read_trailer(shard)[1]  # the second of row 0's three
    offset, length = int(segment["offset"]), int(segment["length"])
    for position in random.Random(2).sample(range(offset, offset + length), 80):
        flip(shard, position)
        reader = StoreReader(root)
        with pytest.raises(StoreError, match=rf"{shard.name}(.|\n)*offset {offset}"):
            reader.read(0, fake_sample(0).id)
        assert same_records(reader.read(1, fake_sample(1).id), expected(1))
        shard.write_bytes(whole)


def test_a_shard_that_is_gone_or_cut_is_an_error_that_names_it(make_store) -> None:
    root = make_store(4)
    gone, cut = (root / "shards" / shard_name(1, n) for n in (0, 1))
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:700])
    reader = StoreReader(root)
    with pytest.raises(StoreError, match=gone.name):
        reader.read(0, fake_sample(0).id)
    with pytest.raises(StoreError, match=cut.name):
        reader.read(3, fake_sample(3).id)


def test_the_highest_valid_generation_wins(make_store) -> None:
    root = make_store(2)
    writer = StoreWriter(root, fake_manifest(), 1 << 30, 1e9)
    writer.add(expected(0, 2))
    writer.seal()  # not closed: a compacted journal would have dropped the first record
    assert same_records(StoreReader(root).read(0, fake_sample(0).id), expected(0, 2))
    newest = root / "shards" / shard_name(2, 0)
    flip(newest, int(read_trailer(newest)["offset"][0]) + 300)
    assert same_records(StoreReader(root).read(0, fake_sample(0).id), expected(0, 1))
    writer.close()


def test_a_record_is_one_positioned_read_a_segment(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StoreReader(make_store(4))
    sizes: list[int] = []
    real = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        sizes.append(length)
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    reader.read(3, fake_sample(3).id)
    assert len(sizes) == 3
    reader.read(1, fake_sample(1).id)
    assert len(sizes) == 4


def test_reading_changes_nothing_on_disk(make_store) -> None:
    root = make_store(4)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*")}
    reader = StoreReader(root)
    for row in range(4):
        reader.read(row, fake_sample(row).id)
    reader.close()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*")} == before


def test_many_threads_with_few_descriptors_read_the_right_bytes(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_OPEN_FILES", 1)
    reader = StoreReader(make_store(10))
    barrier = threading.Barrier(4)

    def work(seed: int) -> bool:
        barrier.wait()
        rows = [random.Random(seed * 100 + k).randrange(10) for k in range(60)]
        return all(same_records(reader.read(row, fake_sample(row).id), expected(row)) for row in rows)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_descriptors_are_bounded_and_closed(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_OPEN_FILES", 2)
    reader = StoreReader(make_store(12))
    before = len(os.listdir("/proc/self/fd"))
    for row in range(12):
        reader.read(row, fake_sample(row).id)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"manifest\.json"):
        StoreReader(tmp_path)


def test_an_open_store_without_a_sealed_shard_reads_as_empty(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9)
    writer.add(fake_record(0, writer.generation))
    reader = StoreReader(tmp_path)
    assert (reader.num_records, reader.num_tokens, reader.stored_bytes) == (0, 0, 0)
    writer.close()


def test_an_index_that_names_another_record_is_noticed(make_store) -> None:
    root = make_store(4)
    path = root / journal.FILE_NAME
    rows = journal.read_journal(path)
    wrong = rows.copy()
    for place in ("offset", "length", "digest"):  # row 1 is made to lie where row 2 lies, digest and all
        wrong[place][rows["row"] == 1] = rows[place][rows["row"] == 2]
    shards = (int(rows["shard_generation"][0]), int(rows[rows["row"] == 2]["shard_number"][0]))
    journal.rewrite_journal(path, journal.journal_rows(wrong, *shards))
    with pytest.raises(StoreError, match="another segment"):
        StoreReader(root).read(1, fake_sample(1).id)


def test_shards_that_are_gone_are_named(make_store) -> None:
    root = make_store(6)
    assert StoreReader(root).missing_shards() == []
    (root / "shards" / shard_name(1, 1)).unlink()
    assert StoreReader(root).missing_shards() == [shard_name(1, 1)]
    shutil.rmtree(root / "shards")
    assert StoreReader(root).missing_shards() == [shard_name(1, n) for n in range(3)]
