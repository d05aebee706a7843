from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.budget import StoreFull, check_room, expected_bytes, record_bytes
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record


def folder_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "manifest.json")


def test_what_is_expected_is_at_least_what_is_written(tmp_path: Path) -> None:
    lengths = [12] * 20
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in range(20):
            writer.add(fake_record(row, 1))
    written = folder_bytes(tmp_path)
    assert written <= expected_bytes(lengths, 64.0) <= 2 * written
    assert expected_bytes(lengths, 64.0) - 4096 == sum(record_bytes(fake_record(row, 1)) for row in range(20))


def test_long_samples_are_expected_in_segments() -> None:
    assert expected_bytes([1000], 16384.0) - expected_bytes([1000], 8192.0) == 1000 * 8192 + 1024


def test_a_capture_that_cannot_end_is_refused_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path, 400, 600, 1000)
    check_room(tmp_path, 400, 600, None)
    with pytest.raises(StoreFull, match=r"1,001 bytes: 400 stored and 601 to come"):
        check_room(tmp_path, 400, 601, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 599})())
    with pytest.raises(StoreFull, match="599"):
        check_room(tmp_path, 400, 600, 1000)


def add(writer: StoreWriter, rows: Iterable[int]) -> None:
    for row in rows:
        writer.add(fake_record(row, writer.generation))


@pytest.mark.parametrize("shard_bytes", [1, 5000, 1 << 30])
def test_a_writer_stops_within_its_budget_and_goes_on_with_a_larger_one(tmp_path: Path, shard_bytes: int) -> None:
    max_bytes = 40_000
    with StoreWriter(tmp_path, fake_manifest(), shard_bytes, 1e9, max_bytes=max_bytes) as writer:
        with pytest.raises(StoreFull, match=r"store\.max_bytes 40,000") as caught:
            add(writer, range(100))
        rows = len(writer.committed) + len(writer._pending)
        assert isinstance(caught.value, StoreError)
        writer.fail(fake_record(99, 1).id, 99, "still open", permanent=False)
    assert 0.6 * max_bytes <= folder_bytes(tmp_path) <= max_bytes
    assert StoreReader(tmp_path).rows.tolist() == list(range(rows))
    assert verify(tmp_path) == []
    writer = StoreWriter(tmp_path, fake_manifest(), shard_bytes, 1e9, max_bytes=max_bytes)
    with writer, pytest.raises(StoreFull):
        add(writer, range(rows, 100))
    with StoreWriter(tmp_path, fake_manifest(), shard_bytes, 1e9, max_bytes=10 * max_bytes) as writer:
        assert writer.num_bytes <= max_bytes
        add(writer, sorted(set(range(100)) - set(writer.committed)))
    assert StoreReader(tmp_path).num_records == 100


def test_the_writer_knows_the_bytes_of_its_store(tmp_path: Path) -> None:
    for start in (0, 7):
        with StoreWriter(tmp_path, fake_manifest(), 3000, 1e9) as writer:
            for row in range(start, start + 7):
                writer.add(fake_record(row, writer.generation))
            writer.seal()
            sizes = [p.stat().st_size for p in (*(tmp_path / "shards").iterdir(), tmp_path / "index.journal")]
            assert writer.num_bytes == sum(sizes)
