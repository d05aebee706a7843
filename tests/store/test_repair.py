import json
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.reader import StoreReader
from headrace.store.repair import repair
from headrace.store.shard import read_trailer, shard_name
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_sound_store_is_left_as_it_is(make_store) -> None:
    root = make_store(4)
    assert repair(root).rows == ()
    assert not (root / "quarantine").exists()


def test_only_the_damaged_record_is_lost_and_capture_can_fill_it(make_store) -> None:
    root = make_store(4)
    shard = root / "shards" / shard_name(1, 0)
    damage(shard, int(read_trailer(shard)["offset"][0]) + 300)
    done = repair(root)
    assert done.rows == (0,)
    assert "quarantine" in done.notes[0]
    assert (root / "quarantine" / shard.name).exists()
    assert json.loads((root / "quarantine" / f"{shard.name}.json").read_text())[0]["row"] == 0
    assert verify(root) == []
    assert StoreReader(root).rows.tolist() == [1, 2, 3]
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        assert 0 not in writer.committed
        writer.add(fake_record(0, writer.generation))
    reader = StoreReader(root)
    assert reader.rows.tolist() == [0, 1, 2, 3]
    assert same_records(reader.read(1, fake_sample(1).id), fake_record(1, 1))


def test_a_damaged_index_costs_no_record(make_store) -> None:
    root = make_store(4)
    shard = root / "shards" / shard_name(1, 1)
    damage(shard, shard.stat().st_size - 60)
    assert repair(root).rows == ()
    assert StoreReader(root).rows.tolist() == [0, 1, 2, 3]
    assert verify(root) == []


def test_repair_waits_for_no_writer(make_store) -> None:
    root = make_store(2)
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9), pytest.raises(StoreError, match="only writer"):
        repair(root)
