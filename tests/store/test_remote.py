import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StoreError
from headrace.source import Hole, Position
from headrace.store.commits import CommitLog
from headrace.store.folder_source import FolderSource
from headrace.store.objects import IN_FLIGHT, Objects
from headrace.store.reader import DamagedRecord
from headrace.store.remote import open_reader, open_source, read_ahead
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import shard_name
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import S3


def write(address: str, staging: Path, num_records: int = 6) -> str:
    """Rows 0..n-1, two a shard; row 99 failed for good."""
    with RemoteWriter(address, staging, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in range(num_records):
            writer.add(fake_record(row, writer.generation, num_segments=3 if row % 3 == 0 else 1))
            if row % 2:
                writer.seal()
        writer.fail(fake_sample(99).id, 99, "states are not finite", permanent=True)
    return address


def positions(*rows: int) -> list[Position]:
    return [Position(0, place, row, fake_sample(row).id) for place, row in enumerate(rows)]


def flip(address: str, key: str, place: int) -> None:
    objects = Objects(address)
    content = bytearray(objects.get(key))
    content[place] ^= 1
    objects.replace(key, bytes(content))


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_what_was_written_is_read(s3: S3, tmp_path: Path, kind: str) -> None:
    address = s3.address().replace("s3://", f"{kind}://")
    reader = open_reader(write(address, tmp_path / "staging"))
    assert reader.rows.tolist() == list(range(6))
    assert reader.manifest.identity() == fake_manifest().identity()
    assert reader.failures[99].reason == "states are not finite"
    assert reader.missing_shards() == []
    for row in range(6):
        record = fake_record(row, 1, num_segments=3 if row % 3 == 0 else 1)
        assert same_records(reader.read(row, fake_sample(row).id), record)
    assert [s.segment for s in reader.read_tokens(3, fake_sample(3).id, 5, 9)] == [1, 2]
    reader.close()


def test_a_record_is_one_range_read(s3: S3, tmp_path: Path) -> None:
    reader = open_reader(write(s3.address(), tmp_path / "staging"))
    s3.ask()
    reader.read(3, fake_sample(3).id)
    assert len(s3.seen("/shards/")) == 1
    reader.close()


def test_a_source_keeps_many_reads_in_flight_and_its_order(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging", num_records=40)
    source = open_source(address, tmp_path / "states", read_ahead=4)
    s3.ask(meet=[IN_FLIGHT, "/shards/"])  # a read is answered only when so many wait
    rows = np.random.default_rng(0).permutation(np.tile(np.arange(40), 2))[: 2 * IN_FLIGHT].tolist()
    assert [item.row for item in source.records(positions(*rows))] == rows
    assert len(s3.seen("GET")) == 2 * IN_FLIGHT
    source.close()
    source.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("headrace-read", "headrace-objects"))]


def test_a_folder_is_opened_as_before(make_store, tmp_path: Path) -> None:
    root = make_store(3)
    assert open_reader(str(root)).rows.tolist() == [0, 1, 2]
    source = open_source(None, root, 2)
    assert [item.row for item in source.records(positions(2, 0))] == [2, 0]
    source.close()


def test_damage_is_a_hole_and_a_shard_that_is_gone_an_error(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    place = int(open_reader(address).entries()["offset"][3]) + 400
    flip(address, f"shards/{shard_name(1, 0)}", place)
    source = open_source(address, tmp_path / "states", 2)
    assert isinstance(source, FolderSource)
    items = list(source.records(positions(0, 1, 2, 99)))
    assert [isinstance(item, Hole) for item in items] == [False, True, False, True]
    assert address in source.damaged[1]
    Objects(address).remove([f"shards/{shard_name(1, 1)}"])
    with pytest.raises(StoreError, match=f"row 2 intact in {address}/shards/{shard_name(1, 1)}") as caught:
        list(source.records(positions(2)))
    assert not isinstance(caught.value, DamagedRecord)
    assert open_reader(address).missing_shards() == [shard_name(1, 1)]
    source.close()


def test_a_shard_cut_short_is_damage(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    key = f"shards/{shard_name(1, 0)}"
    objects = Objects(address)
    whole = objects.get(key)
    reader = open_reader(address)
    for length in (20, int(reader.entries()["offset"][3]) + 10):
        objects.replace(key, whole[:length])
        with pytest.raises(DamagedRecord, match="bytes at offset"):
            reader.read(1, fake_sample(1).id)
    reader.close()


def test_a_server_that_refuses_is_never_damage(s3: S3, tmp_path: Path) -> None:
    source = open_source(write(s3.address(), tmp_path / "staging"), tmp_path / "states", 2)
    s3.ask(fail=[1000, "AccessDenied", "/shards/"])
    with pytest.raises(StoreError, match="AccessDenied"):
        list(source.records(positions(0)))
    assert source.holes().keys() == {99}
    source.close()


def test_an_address_without_a_store_is_an_error(s3: S3) -> None:
    with pytest.raises(StoreError, match="a store at s3://"):
        open_reader(s3.address())


def test_a_damaged_commit_is_named(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    flip(address, "commits/0000000002", 30)
    with pytest.raises(StoreError, match="commits/0000000002 as headrace wrote it"):
        open_reader(address)


def test_the_index_is_kept_on_this_machine(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    open_reader(address).close()
    (kept,) = (tmp_path / "cache" / "headrace").glob("*/*/[0-9]*")
    (kept / "index.journal").write_bytes(b"rubbish")
    assert open_reader(address).num_records == 6  # made anew: the copy was damaged, not the store
    with RemoteWriter(address, tmp_path / "staging", fake_manifest(), 1 << 30, 1e9) as writer:
        writer.add(fake_record(6, writer.generation))
    assert open_reader(address).num_records == 7
    (now,) = (tmp_path / "cache" / "headrace").glob("*/*/[0-9]*")
    assert now.name > kept.name


def test_readers_that_open_together_share_the_index(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    with ThreadPoolExecutor(6) as pool:
        readers = list(pool.map(open_reader, [address] * 6))
    assert {reader.num_records for reader in readers} == {6}
    assert len({reader.root for reader in readers}) == 1


def test_a_cache_that_cannot_be_written_is_an_error(s3: S3, tmp_path: Path, monkeypatch) -> None:
    address = write(s3.address(), tmp_path / "staging")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="a folder that can be written"):
        open_reader(address)


def test_another_store_at_the_same_address_is_not_mistaken(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "one")
    open_reader(address).close()
    objects = Objects(address)
    objects.remove([key for folder in ("commits", "shards", "leases") for key in objects.sizes(folder)])
    write(address, tmp_path / "two", num_records=2)
    reader = open_reader(address)
    assert reader.num_records == 2
    state = CommitLog(objects).read()
    assert state is not None
    assert reader.root.parent.name == state.store.hex()


@pytest.mark.parametrize("at", ["folder", "memory://x"])
def test_reading_ahead_keeps_the_order_and_fails_in_its_turn(at: str) -> None:
    asked: list[int] = []
    begun = threading.Barrier(1 if at == "folder" else IN_FLIGHT)

    def rows() -> Iterator[int]:
        for row in range(2 * IN_FLIGHT):
            asked.append(row)
            yield row

    def read(row: int) -> int:
        begun.wait(20)  # only so many reads at once let one another go on
        if row == IN_FLIGHT + 1:
            raise StoreError("it", "not it", "")
        return row * row

    found = []

    def gather() -> None:
        for row, square in read_ahead(at, read, rows()):
            found.append((row, square))
            assert asked[-1] - row < begun.parties

    with pytest.raises(StoreError, match="not it"):
        gather()
    assert found == [(row, row * row) for row in range(IN_FLIGHT + 1)]
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-read")]
