import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.config import StoreConfig
from headrace.errors import StoreError
from headrace.store import remote_writer
from headrace.store.budget import StoreFull
from headrace.store.commits import CommitLog
from headrace.store.objects import Objects
from headrace.store.reader import StoreReader
from headrace.store.remote import open_reader
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter, open_writer
from headrace.store.shard import shard_name
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records
from tests.store.conftest import S3


def opened(address: str, staging: Path, **more: object) -> RemoteWriter:
    return RemoteWriter(address, staging, fake_manifest(), 1 << 30, 1e9, **{"lease_seconds": 0.4, **more})


def found(address: str) -> dict[int, int]:
    """Generation of each row that a reader sees, every record checked."""
    reader = open_reader(address)
    generations = dict(zip(reader.rows.tolist(), reader.generations.tolist(), strict=True))
    for row, generation in generations.items():
        assert same_records(reader.read(row, fake_sample(row).id), fake_record(row, generation))
    reader.close()
    return generations


def test_a_store_is_resumed_from_any_machine(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    for k in range(4):
        with opened(address, tmp_path / f"machine-{k % 2}") as writer:
            assert writer.notes == []
            assert writer.generation == k + 1
            assert sorted(writer.committed) == [*range(k)]
            writer.add(fake_record(k, writer.generation))
            writer.fail(fake_sample(90 + k).id, 90 + k, "no", permanent=True)
            assert sorted(writer.failed) == [*range(90, 91 + k)]
    assert found(address) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert sorted(open_reader(address).failures) == [90, 91, 92, 93]
    assert list((tmp_path / "machine-1" / "shards").iterdir()) == []  # nothing stays that is committed
    with pytest.raises(StoreError, match="shards of this folder were moved"):
        StoreReader(tmp_path / "machine-1").read(3, fake_sample(3).id)


def test_shards_do_not_pile_up_in_the_folder(s3: S3, tmp_path: Path) -> None:
    with opened(s3.address(), tmp_path) as writer:
        for row in range(6):
            writer.add(fake_record(row, writer.generation))
            writer.seal()
            assert list((tmp_path / "shards").iterdir()) == []
        assert writer.num_bytes > 6 * 64 * 12


def test_superseded_rows_leave_the_log_at_close(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    for _ in range(2):
        with opened(address, tmp_path) as writer:
            for row in range(3):
                writer.add(fake_record(row, writer.generation))
    assert found(address) == {0: 2, 1: 2, 2: 2}
    state = CommitLog(Objects(address)).read()
    assert state is not None
    assert state.removable == (state.last,)  # one commit with everything
    assert open_reader(address).entries()["generation"].tolist() == [2, 2, 2]


def test_many_commits_are_compacted_at_close(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path) as writer:
        for row in range(remote_writer.COMPACT_AFTER + 1):
            writer.add(fake_record(row, writer.generation))
            writer.seal()
        writer.fail(fake_sample(99).id, 99, "no", permanent=True)
    assert len(Objects(address).sizes("commits")) == 2
    assert len(found(address)) == remote_writer.COMPACT_AFTER + 1
    assert sorted(open_reader(address).failures) == [99]


def test_a_living_writer_keeps_others_out(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path / "one") as writer:
        with pytest.raises(StoreError, match="which is alive"):
            opened(address, tmp_path / "two")
        with pytest.raises(StoreError, match="only writer"):
            opened(address, tmp_path / "one")
        writer.add(fake_record(0, writer.generation))
    with opened(address, tmp_path / "two") as writer:
        assert list(writer.committed) == [0]


def test_another_identity_is_refused_and_grown_sets_are_not(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path) as writer:
        writer.add(fake_record(0, writer.generation))
    grown = fake_manifest(prepared="prepared-2")
    with pytest.raises(StoreError, match="prepared 'prepared-2'"):
        RemoteWriter(address, tmp_path, grown, 1 << 30, 1e9)
    with RemoteWriter(address, tmp_path, grown, 1 << 30, 1e9, grown_from=["prepared-1"]) as writer:
        assert list(writer.committed) == [0]
    assert open_reader(address).manifest.prepared == "prepared-2"
    with pytest.raises(StoreError, match="prepared"):
        opened(address, tmp_path)


def test_a_budget_holds_over_all_machines(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path / "one") as writer:
        writer.add(fake_record(0, writer.generation))
        writer.seal()
        held = writer.num_bytes
    with opened(address, tmp_path / "two", max_bytes=held + 100) as writer, pytest.raises(StoreFull):
        writer.add(fake_record(1, writer.generation))
    assert found(address) == {0: 1}


def test_rows_of_a_shard_that_is_gone_are_missing(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path) as writer:
        for row in range(2):
            writer.add(fake_record(row, writer.generation))
            writer.seal()
    Objects(address).remove([f"shards/{shard_name(1, 0)}"])
    with opened(address, tmp_path) as writer:
        assert any("is gone" in note for note in writer.notes)
        assert list(writer.committed) == [1]
        writer.add(fake_record(0, writer.generation))
    assert found(address) == {0: 2, 1: 1}
    assert verify_objects(address) == []


def test_a_folder_of_states_moves_to_an_address(s3: S3, tmp_path: Path) -> None:
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as local:
        for row in range(4):
            local.add(fake_record(row, local.generation))
            if row % 2:
                local.seal()
        local.fail(fake_sample(9).id, 9, "no", permanent=True)
    address = s3.address()
    with opened(address, tmp_path) as writer:
        assert sorted(writer.committed) == [0, 1, 2, 3]
        assert writer.generation == 2
    assert found(address) == dict.fromkeys(range(4), 1)
    assert list(open_reader(address).failures) == [9]
    assert list((tmp_path / "shards").iterdir()) == []


def test_two_folders_do_not_overwrite_each_other(s3: S3, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with StoreWriter(tmp_path / name, fake_manifest(), 1 << 30, 1e9) as local:
            local.add(fake_record(3 if name == "one" else 7, local.generation))
    address = s3.address()
    opened(address, tmp_path / "one").close()
    before = found(address)
    with pytest.raises(StoreError, match=r"000001-000000.arrow as in"):
        opened(address, tmp_path / "two")
    assert found(address) == before
    assert StoreReader(tmp_path / "two").rows.tolist() == [7]  # and that folder is as it was
    StoreReader(tmp_path / "two").read(7, fake_sample(7).id)


def test_states_of_another_identity_are_not_moved(s3: S3, tmp_path: Path) -> None:
    StoreWriter(tmp_path, fake_manifest(dtype="float16"), 1 << 30, 1e9).close()
    with pytest.raises(StoreError, match="dtype 'float32'"):
        opened(s3.address(), tmp_path)


def test_a_shard_lost_at_the_address_and_still_here_goes_up_again(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as local:
        local.add(fake_record(0, local.generation))
    shutil.copytree(tmp_path / "shards", tmp_path / "copy")
    opened(address, tmp_path).close()
    Objects(address).remove([f"shards/{shard_name(1, 0)}"])
    shutil.copytree(tmp_path / "copy", tmp_path / "shards", dirs_exist_ok=True)
    opened(address, tmp_path).close()
    assert found(address) == {0: 1}


def test_open_writer_follows_the_setting(s3: S3, tmp_path: Path) -> None:
    for at, kind in [(None, StoreWriter), (s3.address(), RemoteWriter)]:
        with open_writer(tmp_path / kind.__name__, fake_manifest(), StoreConfig(at=at)) as writer:
            assert type(writer) is kind


def test_a_busy_server_delays_and_loses_nothing(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    with opened(address, tmp_path) as writer:
        writer.add(fake_record(0, writer.generation))
        s3.ask(fail=[3, "SlowDown", "/deep/"])
        writer.seal()
        assert len(s3.seen("PUT")) > 2
    assert found(address) == {0: 1}


def test_after_a_refusal_nothing_more_is_written_and_the_shard_is_kept(s3: S3, tmp_path: Path) -> None:
    address = s3.address()
    writer = opened(address, tmp_path)
    writer.add(fake_record(0, writer.generation))
    s3.ask(fail=[1000, "AccessDenied", "/shards/"])
    with pytest.raises(StoreError, match="AccessDenied"):
        writer.seal()
    with pytest.raises(StoreError, match="an open writer"):
        writer.add(fake_record(1, writer.generation))
    writer.close()
    assert found(address) == {}
    s3.ask()
    with opened(address, tmp_path) as again:
        assert list(again.committed) == [0]
        assert again.notes == ["000001-000000.arrow was sealed here and not committed; it is now"]
    assert found(address) == {0: 1}


def test_uploads_that_nobody_completed_are_aborted_and_shards_that_nobody_committed_removed(
    s3: S3, tmp_path: Path
) -> None:
    address = s3.address()
    opened(address, tmp_path).close()
    objects = Objects(address)
    objects.create(f"shards/{shard_name(1, 5)}", os.urandom(100))
    root = address.removeprefix("s3://").removeprefix("states/")
    for k in range(2):
        objects._fs.call_s3("create_multipart_upload", Bucket="states", Key=f"{root}/shards/{shard_name(1, k)}")
    with opened(address, tmp_path / "two") as writer:
        assert writer.notes == [
            "1 shards were uploaded and never committed; they are removed",
            "2 uploads were never completed; they are aborted",
        ]
    assert objects.sizes("shards") == {}
    assert "Uploads" not in objects._fs.call_s3("list_multipart_uploads", Bucket="states", Prefix=root)


SLEEPER = """
import os, signal, sys
from pathlib import Path
from headrace.errors import StoreError
from headrace.store.objects import Objects
from headrace.store.remote_writer import RemoteWriter
from headrace.testing.states import fake_manifest, fake_record

address, staging, where = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
real = Objects.create


def create(self, key, content):
    if key.startswith(where):
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(self, key, content)


with RemoteWriter(address, staging, fake_manifest(), 1 << 30, 1e9, lease_seconds=0.6) as writer:
    writer.add(fake_record(0, writer.generation))
    writer.seal()
    writer.add(fake_record(1, writer.generation))
    Objects.create = create
    try:
        writer.seal()
    except StoreError as exc:
        print(type(exc).__name__, writer.generation, sorted(writer.committed))
"""


@pytest.mark.parametrize("where", ["shards/", "commits/"])
def test_a_writer_that_slept_through_its_lease_commits_nothing(s3: S3, tmp_path: Path, where: str) -> None:
    address = s3.address()
    words = [sys.executable, "-c", SLEEPER, address, str(tmp_path / "asleep"), where]
    asleep = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        _until_stopped(asleep.pid)
        with opened(address, tmp_path / "awake", lease_seconds=0.6) as writer:  # its lease runs out first
            assert list(writer.committed) == [0]
            for row in (1, 2):
                writer.add(fake_record(row, writer.generation))
            writer.seal()
            os.kill(asleep.pid, signal.SIGCONT)
            out, _ = asleep.communicate(timeout=60)
            writer.add(fake_record(3, writer.generation))
    finally:
        asleep.kill()
        asleep.wait()
    assert out == "LostLease 1 [0]\n"
    assert found(address) == {0: 1, 1: 2, 2: 2, 3: 2}
    assert open_reader(address).entries()["generation"].tolist() == [1, 2, 2, 2]
    assert verify_objects(address) == []
    with opened(address, tmp_path / "asleep") as again:  # what it had staged is superseded by then
        assert sorted(again.committed) == [0, 1, 2, 3]
    assert found(address) == {0: 1, 1: 2, 2: 2, 3: 2}


def _until_stopped(pid: int) -> None:
    for _ in range(600):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.05)
    raise AssertionError("it never stopped")


UPLOADER = """
import sys
from pathlib import Path
from dataclasses import replace
from headrace.record import Record
from headrace.store import objects
from headrace.store.remote_writer import RemoteWriter
from headrace.testing.states import fake_manifest, fake_record

objects.PART_BYTES = int(sys.argv[3])
with RemoteWriter(sys.argv[1], Path(sys.argv[2]), fake_manifest(), 1 << 30, 1e9) as writer:
    for row in range(2):
        record = fake_record(row, writer.generation)
        large = replace(record.segments[0], payload=bytes(7_000_000))
        writer.add(Record((large,)))
    writer.seal()
"""


@pytest.mark.parametrize(("part_bytes", "held"), [(1 << 30, "/shards/"), (5 << 20, "partNumber=2")])
def test_a_kill_in_the_middle_of_an_upload_shows_nothing_of_it(
    s3: S3, tmp_path: Path, part_bytes: int, held: str
) -> None:
    address = s3.address()
    s3.ask(hold=[1.5, held])  # the server takes the request and reads no further meanwhile
    words = [sys.executable, "-c", UPLOADER, address, str(tmp_path / "staging"), str(part_bytes)]
    process = subprocess.Popen(words)
    while not s3.seen(f"PUT /states/{address.removeprefix('s3://states/')}/shards/"):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.kill()
    process.wait()
    time.sleep(1.8)
    s3.ask()
    assert Objects(address).sizes("shards") == {}
    assert found(address) == {}
    with opened(address, tmp_path / "staging") as writer:
        assert sorted(writer.committed) == [0, 1]
        aborted = [note for note in writer.notes if "aborted" in note]
        assert aborted == (["1 uploads were never completed; they are aborted"] if "part" in held else [])
    assert verify_objects(address) == []
    assert open_reader(address).read(1, fake_sample(1).id).num_bytes == 7_000_000
