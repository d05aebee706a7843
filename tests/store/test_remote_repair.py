import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import StoreError
from headrace.store.commits import CommitLog
from headrace.store.objects import Objects
from headrace.store.remote import open_reader
from headrace.store.remote_repair import repair_objects
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import shard_name
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import S3
from tests.store.test_remote import flip, write


@pytest.fixture
def address(s3: S3, tmp_path: Path) -> str:
    """A store of rows 0 to 5, two a shard, in this process's memory."""
    return write(s3.address().replace("s3://", "memory://"), tmp_path / "staging")


def again(address: str, staging: Path, *rows: int) -> None:
    with RemoteWriter(address, staging, fake_manifest(), 1 << 30, 1e9) as writer:
        assert not set(rows) & set(writer.committed)
        for row in rows:
            writer.add(fake_record(row, writer.generation))


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_only_what_is_damaged_or_gone_is_lost_and_capture_can_fill_it(s3: S3, tmp_path: Path, kind: str) -> None:
    address = write(s3.address().replace("s3://", f"{kind}://"), tmp_path / "staging")
    objects = Objects(address)
    flip(address, f"shards/{shard_name(1, 1)}", 3000)  # row 3
    damaged = objects.get(f"shards/{shard_name(1, 1)}")
    objects.remove([f"shards/{shard_name(1, 2)}"])
    done = repair_objects(address)
    assert done.rows == (3, 4, 5)
    assert done.notes == (
        f"{shard_name(1, 2)} is gone or cut short; its records are to be captured again",
        f"{shard_name(1, 1)} is in quarantine; what was intact in it is kept as {shard_name(2, 0)}",
    )
    assert objects.get(f"quarantine/{shard_name(1, 1)}") == damaged
    assert [d["row"] for d in json.loads(objects.get(f"quarantine/{shard_name(1, 1)}.json"))] == [3]
    assert verify_objects(address) == []
    reader = open_reader(address)
    assert reader.rows.tolist() == [0, 1, 2]
    assert reader.failures.keys() == {99}
    assert set(objects.sizes("shards")) == {f"shards/{shard_name(*key)}" for key in [(1, 0), (2, 0)]}
    again(address, tmp_path / "staging", 3, 4, 5)
    reader = open_reader(address)
    assert reader.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert same_records(reader.read(2, fake_sample(2).id), fake_record(2, 1))
    assert repair_objects(address).rows == ()


def test_what_is_left_over_goes_and_many_commits_become_one(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    objects = Objects(address)
    objects.create(f"shards/{shard_name(1, 7)}", os.urandom(100))
    key = f"{address.removeprefix('s3://states/')}/shards/{shard_name(1, 8)}"
    objects._fs.call_s3("create_multipart_upload", Bucket="states", Key=key)
    s3.ask()
    done = repair_objects(address, payloads=False)
    assert not [line for line in s3.seen("GET") if "/shards/" in line]  # no shard was read
    assert done.rows == ()
    assert done.notes == (
        "1 shards were uploaded and never committed; they are removed",
        "1 uploads were never completed; they are aborted",
        "4 commits are now one",
    )
    assert "Uploads" not in objects._fs.call_s3("list_multipart_uploads", Bucket="states", Prefix=key)
    assert len(objects.sizes("shards")) == 3
    state = CommitLog(objects).read()
    assert state is not None
    assert state.removable == (state.last,)
    assert repair_objects(address).notes == ()
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_damaged_index_costs_no_record(address: str) -> None:
    flip(address, f"shards/{shard_name(1, 1)}", -60)
    assert repair_objects(address).rows == ()
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert verify_objects(address) == []


def test_what_is_intact_in_a_shard_that_was_cut_short_is_kept(address: str) -> None:
    objects, key = Objects(address), f"shards/{shard_name(1, 1)}"
    objects.replace(key, objects.get(key)[:3000])
    done = repair_objects(address)
    assert done.rows == (3,)
    assert open_reader(address).rows.tolist() == [0, 1, 2, 4, 5]
    assert verify_objects(address) == []


def test_an_older_record_is_kept_where_the_newest_is_damaged(address: str, tmp_path: Path) -> None:
    with RemoteWriter(address, tmp_path / "staging", fake_manifest(), 1 << 30, 1e9) as writer:
        writer._compact = lambda: None  # as a kill before close leaves it
        writer.add(fake_record(1, writer.generation))
    flip(address, f"shards/{shard_name(2, 0)}", 1500)
    flip(address, f"shards/{shard_name(1, 1)}", 3000)
    done = repair_objects(address)
    assert done.rows == (1, 3)
    assert f"{shard_name(2, 0)} is in quarantine; nothing in it was intact" in done.notes
    reader = open_reader(address)
    assert (reader.rows.tolist(), reader.generations[1]) == ([0, 1, 2, 4, 5], 1)


def test_a_server_that_does_not_answer_is_never_damage(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    s3.ask(fail=[1000, "AccessDenied", f"/shards/{shard_name(1, 1)}"])
    with pytest.raises(StoreError, match="AccessDenied"):
        repair_objects(address)
    s3.ask()
    assert verify_objects(address) == []
    assert Objects(address).sizes("quarantine") == {}


def test_a_damaged_commit_stops_it(address: str) -> None:
    flip(address, "commits/0000000001", 50)
    with pytest.raises(StoreError, match="0000000001"):
        repair_objects(address)


def test_a_living_writer_keeps_it_out(address: str, tmp_path: Path) -> None:
    with (
        RemoteWriter(address, tmp_path / "alive", fake_manifest(), 1 << 30, 1e9, lease_seconds=0.4),
        pytest.raises(StoreError, match="which is alive"),
    ):
        repair_objects(address, lease_seconds=0.4)


def test_the_command_takes_an_address(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    flip(address, f"shards/{shard_name(1, 1)}", 3000)
    done = CliRunner().invoke(app, ["store", "verify", address])
    assert done.exit_code == 8
    assert f"run `headrace store repair {address}`" in done.stderr
    done = CliRunner().invoke(app, ["store", "repair", address, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["rows"] == [3]
    assert CliRunner().invoke(app, ["store", "verify", address]).exit_code == 0
    done = CliRunner().invoke(app, ["store", "repair", address, "--indexes-only"])
    assert (done.exit_code, done.stdout) == (0, "")
