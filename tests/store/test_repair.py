import json
import shutil
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


def test_damaged_failures_are_mended_and_their_rows_are_missing_again(make_store) -> None:
    root = make_store(2)
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in (7, 8):
            writer.fail(fake_sample(row).id, row, "not finite", permanent=True)
    path = root / "failures.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"row":7', b'"row":6'))
    assert [d.path for d in verify(root)] == [path.name]
    done = repair(root)
    assert done.rows == ()
    assert ["1 damaged lines are in quarantine, 1 sound" in note for note in done.notes] == [True]
    assert verify(root) == []
    assert set(StoreReader(root).failures) == {8}
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        assert set(writer.failed) == {8}
    assert repair(root).notes == ()


def test_failures_that_end_torn_are_cut(make_store) -> None:
    root = make_store(2)
    (root / "failures.jsonl").write_bytes(b"rubbish\n{")
    repair(root)
    assert (root / "failures.jsonl").read_bytes() == b""


@pytest.mark.parametrize("is_file", [False, True])
def test_a_store_without_its_folder_of_shards_is_left_as_it_is(make_store, is_file: bool) -> None:
    root = make_store(4)
    journal = (root / "index.journal").read_bytes()
    shutil.rmtree(root / "shards")
    if is_file:
        (root / "shards").write_text("")
    with pytest.raises(StoreError, match="shards"):
        repair(root)
    assert (root / "index.journal").read_bytes() == journal


def test_a_file_in_the_place_of_the_quarantine_is_an_error_before_anything_is_done(make_store) -> None:
    root = make_store(4)
    (root / "quarantine").write_text("x")
    shard = root / "shards" / shard_name(1, 0)
    damage(shard, int(read_trailer(shard)["offset"][0]) + 300)
    before = sorted(p.name for p in (root / "shards").iterdir())
    with pytest.raises(StoreError, match="quarantine"):
        repair(root)
    assert sorted(p.name for p in (root / "shards").iterdir()) == before


def test_what_the_disk_refuses_is_an_error_of_the_store(make_store) -> None:
    root = make_store(2)
    (root / "lock").unlink()
    (root / "lock").mkdir()
    with pytest.raises(StoreError, match="can be written"):
        repair(root)
