import os
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.reader import StoreReader
from headrace.store.remove import remove
from headrace.store.repair import repair
from headrace.store.shard import read_trailer, shard_name
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def again(root: Path, *rows: int) -> None:
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in rows:
            writer.add(fake_record(row, writer.generation))


def shard_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "shards").iterdir())


def test_removed_rows_are_gone_for_good_and_the_others_stay(make_store) -> None:
    root = make_store(6)
    before = shard_bytes(root)
    done = remove(root, [1, 4, 5])
    assert (done.num_segments, done.num_shards) == (3, 2)
    assert before - shard_bytes(root) == done.freed_bytes > 0
    assert StoreReader(root).rows.tolist() == [0, 2, 3]
    assert same_records(StoreReader(root).read(0, fake_sample(0).id), fake_record(0, 1, num_segments=3))
    assert verify(root) == []
    (root / "index.journal").unlink()
    repair(root)  # made anew from the shards, the journal still has none of them
    assert StoreReader(root).rows.tolist() == [0, 2, 3]
    again(root, 1, 4, 5)
    assert StoreReader(root).rows.tolist() == list(range(6))


def test_every_generation_of_a_row_goes(make_store) -> None:
    root = make_store(4)
    again(root, 1)
    remove(root, [1])
    (root / "index.journal").unlink()
    repair(root)
    assert StoreReader(root).rows.tolist() == [0, 2, 3]


def test_superseded_records_give_their_bytes_back(make_store) -> None:
    root = make_store(4)
    again(root, 0, 1)
    done = remove(root, (), superseded=True)
    assert (done.num_segments, done.num_shards) == (4, 1)
    assert not (root / "shards" / shard_name(1, 0)).exists()
    reader = StoreReader(root)
    assert reader.rows.tolist() == [0, 1, 2, 3]
    assert reader.generations.tolist() == [2, 2, 1, 1]
    assert verify(root) == []
    assert remove(root, (), superseded=True).num_shards == 0


def test_a_row_without_a_record_is_refused(make_store) -> None:
    root = make_store(4)
    with pytest.raises(StoreError, match="none of 9"):
        remove(root, [1, 9])
    assert StoreReader(root).rows.tolist() == [0, 1, 2, 3]


def test_damage_beside_a_removed_record_stops_before_anything_changes(make_store) -> None:
    root = make_store(4)
    shard = root / "shards" / shard_name(1, 0)
    content = bytearray(shard.read_bytes())
    content[int(read_trailer(shard)["offset"][0]) + 300] ^= 1  # row 0
    shard.write_bytes(content)
    with pytest.raises(StoreError, match="row 0 damaged"):
        remove(root, [1, 3])
    assert shard.read_bytes() == content
    assert StoreReader(root).rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("point", range(12))
def test_a_removal_that_is_cut_short_is_done_by_asking_again(make_store, monkeypatch, point: int) -> None:
    root = make_store(6)
    calls = [0]

    def stop(real):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] > point:
                raise OSError(5, "Input/output error")
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, stop(getattr(os, name)))
        with pytest.raises(StoreError):
            remove(root, [1, 4])
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        assert {0, 2, 3, 5} <= set(writer.committed) <= set(range(6))
        left = set(writer.committed) & {1, 4}
    remove(root, left)
    assert StoreReader(root).rows.tolist() == [0, 2, 3, 5]
    assert verify(root) == []
