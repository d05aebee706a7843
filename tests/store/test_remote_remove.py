import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import StoreError
from headrace.store.objects import Objects
from headrace.store.remote import open_reader
from headrace.store.remote_remove import remove_objects
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import shard_name
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import S3
from tests.store.test_remote import flip, write


def again(address: str, staging: Path, *rows: int) -> None:
    with RemoteWriter(address, staging, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in rows:
            writer.add(fake_record(row, writer.generation))


def shard_bytes(address: str) -> int:
    return sum(Objects(address).sizes("shards").values())


@pytest.fixture
def address(s3: S3, tmp_path: Path) -> str:
    """A store of rows 0 to 5, two a shard, in this process's memory."""
    return write(s3.address().replace("s3://", "memory://"), tmp_path / "staging")


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_removed_rows_are_gone_for_good_and_the_others_stay(s3: S3, tmp_path: Path, kind: str) -> None:
    address = write(s3.address().replace("s3://", f"{kind}://"), tmp_path / "staging")
    before = shard_bytes(address)
    told: list[tuple[int, int]] = []
    done = remove_objects(address, [1, 4, 5], progress=lambda *at: told.append(at))
    assert (done.num_segments, done.num_shards) == (3, 2)
    assert before - shard_bytes(address) == done.freed_bytes > 0
    assert told == [(1, 3), (2, 3), (3, 3)]
    reader = open_reader(address)
    assert reader.rows.tolist() == [0, 2, 3]
    for row in (0, 2, 3):
        record = fake_record(row, 1, num_segments=3 if row % 3 == 0 else 1)
        assert same_records(reader.read(row, fake_sample(row).id), record)
    assert reader.failures.keys() == {99}
    assert verify_objects(address) == []
    again(address, tmp_path / "staging", 1, 4, 5)
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_shard_that_holds_nothing_more_is_not_fetched(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    s3.ask()
    assert remove_objects(address, [2, 3]).num_shards == 1
    assert not [line for line in s3.seen("GET") if "/shards/" in line]
    assert open_reader(address).rows.tolist() == [0, 1, 4, 5]


def test_every_generation_of_a_row_goes(address: str, tmp_path: Path) -> None:
    again(address, tmp_path / "staging", 1)
    assert open_reader(address).generations.tolist() == [1, 2, 1, 1, 1, 1]
    done = remove_objects(address, [1])
    assert (done.num_segments, done.num_shards) == (2, 2)  # one that the log no longer names
    assert open_reader(address).rows.tolist() == [0, 2, 3, 4, 5]
    for content in map(Objects(address).get, Objects(address).sizes("shards")):
        for generation in (1, 2):
            assert fake_record(1, generation).segments[0].payload not in content


def test_superseded_records_give_their_bytes_back(address: str, tmp_path: Path) -> None:
    again(address, tmp_path / "staging", 0, 1, 2)
    done = remove_objects(address, (), superseded=True)
    assert (done.num_segments, done.num_shards) == (5, 2)
    assert f"shards/{shard_name(1, 0)}" not in Objects(address).sizes("shards")
    reader = open_reader(address)
    assert reader.generations.tolist() == [2, 2, 2, 1, 1, 1]
    assert same_records(reader.read(3, fake_sample(3).id), fake_record(3, 1, num_segments=3))
    assert verify_objects(address) == []
    assert remove_objects(address, (), superseded=True).num_shards == 0


def test_a_superseded_record_beside_others_stays_until_it_is_asked_for(address: str, tmp_path: Path) -> None:
    again(address, tmp_path / "staging", 1)
    assert remove_objects(address, [5]).num_shards == 1
    assert fake_record(1, 1).segments[0].payload in Objects(address).get(f"shards/{shard_name(1, 0)}")


def test_a_row_without_a_record_is_refused(address: str) -> None:
    with pytest.raises(StoreError, match="none of 9"):
        remove_objects(address, [1, 9])
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_damage_beside_a_removed_record_stops_before_anything_is_removed(address: str, tmp_path: Path) -> None:
    flip(address, f"shards/{shard_name(1, 1)}", 3000)  # row 3
    with pytest.raises(StoreError, match="row 3 damaged"):
        remove_objects(address, [1, 2])
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]
    again(address, tmp_path / "staging", 2)
    flip(address, f"shards/{shard_name(1, 1)}", -60)
    with pytest.raises(StoreError, match=f"{shard_name(1, 1)} as it was sealed"):
        remove_objects(address, [5])
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_server_that_refuses_loses_nothing(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    s3.ask(fail=[1000, "AccessDenied", f"/shards/{shard_name(2, 0)}"])
    with pytest.raises(StoreError, match="AccessDenied"):
        remove_objects(address, [1])
    s3.ask()
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert remove_objects(address, [1]).num_segments == 1  # at once: its lease was released


def test_the_command_takes_an_address(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    done = CliRunner().invoke(app, ["store", "rm", address, "0", "2", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["num_segments"] == 4
    assert open_reader(address).rows.tolist() == [1, 3, 4, 5]
    done = CliRunner().invoke(app, ["store", "rm", address, "--superseded"])
    assert done.stdout == "0 segments removed, 0 bytes free again\n"
