import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StoreError
from headrace.store import journal
from headrace.store import reader as reader_module
from headrace.store.reader import DamagedRecord, StoreReader
from headrace.store.shard import read_trailer, shard_name
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import Opens


def expected(row: int, generation: int = 1):
    return fake_record(row, generation, num_segments=3 if row % 3 == 0 else 1)


def test_every_record_comes_back_bit_for_bit(make_store, opened: Opens) -> None:
    reader = opened(make_store(7))
    for row in random.Random(1).sample(range(7), 7):
        assert same_records(reader.read(row, fake_sample(row).id), expected(row))
    assert (reader.num_records, reader.num_tokens, reader.num_trained) == (7, 7 * 12, 7 * 6)
    assert reader.stored_bytes > 7 * 12 * 64
    assert reader.rows.tolist() == list(range(7))
    assert 3 in reader
    assert 7 not in reader


def test_records_that_are_kept_stay_what_they_were_while_others_are_read(tmp_path: Path, opened: Opens) -> None:
    tokens = 4000  # 256,000 bytes of payload: read into memory that is used again
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in range(4):
            writer.add(fake_record(row, 1, num_tokens=tokens))
    reader = opened(tmp_path)
    kept = {row: reader.read(row, fake_sample(row, tokens).id) for row in (0, 1)}
    views = {row: np.frombuffer(reader.read(row, fake_sample(row, tokens).id).segments[0].payload) for row in (2, 3)}
    for _ in range(20):
        for row in range(4):
            reader.read(row, fake_sample(row, tokens).id)
    for row in range(4):
        wanted = fake_record(row, 1, num_tokens=tokens)
        if row in kept:
            assert same_records(kept[row], wanted)
        else:
            assert views[row].tobytes() == wanted.segments[0].payload


def test_a_record_to_be_passed_on_is_the_same_messages_unparsed(make_store, opened: Opens) -> None:
    reader = opened(make_store(7))
    for row in range(7):
        found, read = reader.stored(row, fake_sample(row).id), reader.read(row, fake_sample(row).id)
        messages = [found.message(k) for k in range(len(found.lengths))]
        assert [(bytes(m), seal) for m, seal in messages] == [(bytes(s.sealed[0]), s.sealed[1]) for s in read.segments]
        assert found.num_bytes == sum(len(m) for m, _ in messages)
        assert same_records(found.record(), read)
    with pytest.raises(StoreError, match="row 1 with id"):
        reader.stored(1, fake_sample(2).id)


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


def test_any_flip_inside_a_record_is_an_error_that_names_shard_and_offset(make_store, opened: Opens) -> None:
    root = make_store(2)
    shard = root / "shards" / shard_name(1, 0)
    whole = shard.read_bytes()
    segment = read_trailer(shard)[1]  # the second of row 0's three
    offset, length = int(segment["offset"]), int(segment["length"])
    for position in random.Random(2).sample(range(offset, offset + length), 80):
        flip(shard, position)
        reader = opened(root)
        with pytest.raises(StoreError, match=rf"{shard.name}(.|\n)*offset {offset}"):
            reader.read(0, fake_sample(0).id)
        assert same_records(reader.read(1, fake_sample(1).id), expected(1))
        shard.write_bytes(whole)


def test_a_shard_that_is_gone_or_cut_is_an_error_that_names_it(make_store, opened: Opens) -> None:
    root = make_store(4)
    gone, cut = (root / "shards" / shard_name(1, n) for n in (0, 1))
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:700])
    reader = opened(root)
    with pytest.raises(StoreError, match=gone.name):
        reader.read(0, fake_sample(0).id)
    with pytest.raises(StoreError, match=cut.name):
        reader.read(3, fake_sample(3).id)


def test_the_highest_valid_generation_wins(make_store, opened: Opens) -> None:
    root = make_store(2)
    writer = StoreWriter(root, fake_manifest(), 1 << 30, 1e9)
    writer.add(expected(0, 2))
    writer.seal()  # not closed: a compacted journal would have dropped the first record
    assert same_records(opened(root).read(0, fake_sample(0).id), expected(0, 2))
    newest = root / "shards" / shard_name(2, 0)
    flip(newest, int(read_trailer(newest)["offset"][0]) + 300)
    assert same_records(opened(root).read(0, fake_sample(0).id), expected(0, 1))
    writer.close()


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


def test_a_record_is_one_positioned_read(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StoreReader(make_store(4))
    sizes = counted_reads(monkeypatch)
    reader.read(3, fake_sample(3).id)
    reader.read(1, fake_sample(1).id)
    assert len(sizes) == 2


def test_a_long_record_is_read_in_pieces(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StoreReader(make_store(4))
    sizes = counted_reads(monkeypatch)
    monkeypatch.setattr(reader_module, "READ_BYTES", 2100)
    assert same_records(reader.read(3, fake_sample(3).id), expected(3))
    assert len(sizes) == 2
    assert max(sizes) <= 2100


@pytest.mark.parametrize(("start", "end", "segments"), [(0, 12, (0, 1, 2)), (0, 4, (0,)), (3, 5, (0, 1)), (8, 9, (2,))])
def test_a_range_of_tokens_reads_only_the_segments_that_hold_it(make_store, monkeypatch, start, end, segments) -> None:
    reader = StoreReader(make_store(4))
    sizes = counted_reads(monkeypatch)
    found = reader.read_tokens(3, fake_sample(3).id, start, end)
    assert tuple(segment.segment for segment in found) == segments
    assert found[0].token_start <= start < end <= found[-1].token_start + found[-1].num_tokens
    assert b"".join(s.payload for s in found) == b"".join(expected(3).segments[k].payload for k in segments)
    assert len(sizes) == 1
    assert sizes[0] < 1100 * len(segments)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (5, 4), (0, 13), (12, 13)])
def test_a_range_outside_the_sample_is_refused(make_store, start: int, end: int) -> None:
    with pytest.raises(StoreError, match="within the 12 tokens of row 3"):
        StoreReader(make_store(4)).read_tokens(3, fake_sample(3).id, start, end)


def test_damage_is_told_apart_from_a_disk_that_does_not_answer(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StoreReader(make_store(2))

    def fail(code: int) -> None:
        def raise_error(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "preadv", raise_error)

    fail(errno.EIO)
    with pytest.raises(DamagedRecord, match="Input/output"):
        reader.read(1, fake_sample(1).id)
    fail(errno.ESTALE)
    with pytest.raises(StoreError, match="Stale") as caught:
        reader.read(1, fake_sample(1).id)
    assert not isinstance(caught.value, DamagedRecord)


def test_reading_changes_nothing_on_disk(make_store, opened: Opens) -> None:
    root = make_store(4)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*")}
    reader = opened(root)
    for row in range(4):
        reader.read(row, fake_sample(row).id)
    reader.close()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*")} == before


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"manifest\.json"):
        StoreReader(tmp_path)


def test_an_open_store_without_a_sealed_shard_reads_as_empty(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9)
    writer.add(fake_record(0, writer.generation))
    reader = StoreReader(tmp_path)
    assert (reader.num_records, reader.num_tokens, reader.stored_bytes) == (0, 0, 0)
    writer.close()


def test_an_index_that_names_another_record_is_noticed(make_store, opened: Opens) -> None:
    root = make_store(4)
    path = root / journal.FILE_NAME
    rows = journal.index_rows(journal.read_journal(path))
    mine = rows[rows["row"] == 2]
    mine["row"], mine["id"] = 1, np.void(fake_sample(1).id)  # row 1 is made to lie where row 2 lies, digest and all
    path.unlink()
    journal.append_journal(path, mine, 1, 1)
    with pytest.raises(DamagedRecord, match="another segment"):
        opened(root).read(1, fake_sample(1).id)


def test_shards_that_are_gone_are_named(make_store) -> None:
    root = make_store(6)
    assert StoreReader(root).missing_shards() == []
    (root / "shards" / shard_name(1, 1)).unlink()
    assert StoreReader(root).missing_shards() == [shard_name(1, 1)]
    shutil.rmtree(root / "shards")
    assert StoreReader(root).missing_shards() == [shard_name(1, n) for n in range(3)]
