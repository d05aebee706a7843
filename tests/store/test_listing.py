import shutil
from pathlib import Path

from headrace.store.listing import describe, list_failures, list_records
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample


def test_records_are_listed_without_their_shards(make_store) -> None:
    root = make_store(4)
    shutil.rmtree(root / "shards")
    found = list(list_records(StoreReader(root)))
    assert [entry["row"] for entry in found] == [0, 1, 2, 3]
    assert found[3] == {
        "row": 3,
        "id": fake_sample(3).id.hex(),
        "generation": 1,
        "num_segments": 3,
        "num_tokens": 12,
        "num_trained": 6,
        "num_bytes": found[3]["num_bytes"],
        "shard": "000001-000001.arrow",
    }
    assert sum(entry["num_bytes"] for entry in found) == StoreReader(root).stored_bytes


def test_an_empty_store_lists_nothing(tmp_path: Path) -> None:
    StoreWriter(tmp_path, fake_manifest(), 1, 1.0).close()
    assert list(list_records(StoreReader(tmp_path))) == []


def test_failures_without_a_record_are_listed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in (4, 2):
            writer.fail(fake_sample(row).id, row, "not finite", permanent=True)
        writer.add(fake_record(4, 1))
    assert [(entry["row"], entry["reason"]) for entry in list_failures(StoreReader(tmp_path))] == [(2, "not finite")]


def test_a_part_of_a_record_is_described() -> None:
    record = fake_record(3, 1, num_segments=3)
    whole, part = describe(record.segments), describe(record.segments[1:])
    assert (whole["token_start"], whole["num_tokens"], whole["payload_bytes"]) == (0, 12, 12 * 64)
    assert (part["segments"], part["token_start"], part["num_tokens"]) == ([1, 2], 4, 8)
    assert part["input_ids"] == record.input_ids[4:].tolist()
