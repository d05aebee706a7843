"""kill -9 of a writer, a removal and a repair before and after every request that changes the store; what is left.

A driver forks one that kills itself there, and a checker that goes on in the same folder or on another machine.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.conftest import S3

COMMON = """
import os, signal, sys, threading
from pathlib import Path
from headrace.store.objects import Objects

base, address, mode, stride = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])


def kill_at(point):
    count = 0

    def wrap(real):
        def call(*args):
            nonlocal count
            if threading.current_thread() is not threading.main_thread():
                return real(*args)  # a renewal of the lease: when it comes is chance
            count += 1
            if count == point and mode == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*args)
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    one_by_one = Objects.remove
    Objects.remove = lambda self, keys: [self.remove_one(key) for key in keys]
    Objects.remove_one = lambda self, key: one_by_one(self, [key])
    for name in ["create", "replace", "remove_one", "copy", "abort_uploads"]:
        setattr(Objects, name, wrap(getattr(Objects, name)))


def forked(act, *words):
    pid = os.fork()
    if pid == 0:
        try:
            act(*words)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def killed_everywhere(child, check):  # `child` gets (point, pipe) and may write there what `check` gets
    point, killed = 1 - stride, 0
    while True:
        point += stride
        get, put = os.pipe()
        pid = forked(child, point, put)
        os.close(put)
        told = b""
        while part := os.read(get, 65536):
            told += part
        os.close(get)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return killed
        assert os.WTERMSIG(status) == signal.SIGKILL
        _, status = os.waitpid(forked(check, point, told), 0)
        assert status == 0, ("killed at request", point)
        killed += 1
"""

WRITER = """
from headrace.store import remote_writer
from headrace.store.remote import open_reader
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

remote_writer.COMPACT_AFTER = 1


def opened(point, staging):
    return RemoteWriter(f"{address}/{point}", staging, fake_manifest(), 1 << 30, 1e9, lease_seconds=0.3)


def write_twice(point, staging, told):
    for rows in [(0, 1, 2), (1, 3)]:
        with opened(point, staging) as writer:
            for row in rows:
                writer.add(fake_record(row, writer.generation, 2))
                if row:
                    writer.seal()
                    told(writer)
            writer.fail(fake_sample(9).id, 9, "constant states", True)
            told(writer)
            writer.add(fake_record(4, writer.generation, 2))  # sealed by close


def writer_child(point, pipe):
    def told(writer):
        rows = sorted((row, generation) for row, (_, generation) in writer.committed.items())
        os.write(pipe, f"{rows};{sorted(writer.failed)}|".encode())

    kill_at(point)
    write_twice(point, base / str(point), told)


def seen(point):
    reader = open_reader(f"{address}/{point}")
    found = dict(zip(reader.rows.tolist(), reader.generations.tolist()))
    for row, generation in found.items():
        assert same_records(reader.read(row, fake_sample(row).id), fake_record(row, generation, 2))
    return found, set(reader.failures)


def check(point, told):
    here = f"{address}/{point}"
    done = [part.split(";") for part in told.decode().split("|")[:-1]]
    rows, failed = [eval(x) for x in done[-1]] if done else [[], []]
    if Objects(here).sizes("commits"):
        found, reasons = seen(point)
        for row, generation in rows:
            assert found.get(row, 0) >= generation, ("a sealed record is lost", row, found)
        assert set(failed) <= reasons
    staging = base / str(point) if point % 2 else base / f"{point}-elsewhere"
    with opened(point, staging) as writer:
        for row, generation in rows:
            assert writer.committed[row][1] >= generation
        for row in set(range(5)) - set(writer.committed):
            writer.add(fake_record(row, writer.generation, 2))
    found, _ = seen(point)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert verify_objects(here) == []
    with opened(point, staging) as writer:
        assert writer.notes == [], writer.notes
        names = {f"shards/{g:06d}-{n:06d}.arrow" for g, n in writer._shards}
    assert set(Objects(here).sizes("shards")) == names


print(killed_everywhere(writer_child, check))
"""


@pytest.mark.parametrize(
    ("stride", "at_least"), [(5, 5), pytest.param(1, 22, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_kill_at_any_request_loses_nothing_that_was_sealed(
    s3: S3, tmp_path: Path, mode: str, stride: int, at_least: int
) -> None:
    words = [sys.executable, "-c", COMMON + WRITER, str(tmp_path), s3.address(), mode, str(stride)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= at_least  # requests at which a writer was killed


EDITS = """
from headrace.store.remote import open_reader
from headrace.store.remote_remove import remove_objects
from headrace.store.remote_repair import repair_objects
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import shard_name
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

kind = sys.argv[5]
NEWEST = {0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}


def opened(here, staging):
    return RemoteWriter(here, staging, fake_manifest(), 1 << 30, 1e9, lease_seconds=0.3)


def edit(here):
    if kind == "remove":
        rows = {4} & set(open_reader(here).rows.tolist())
        return remove_objects(here, rows, superseded=True, lease_seconds=0.3)
    return repair_objects(here, lease_seconds=0.3)


def child(point, pipe):
    here, objects = f"{address}/{point}", Objects(f"{address}/{point}")
    for rows in [range(6), [1]]:
        with opened(here, base / str(point)) as writer:
            for row in rows:
                writer.add(fake_record(row, writer.generation, 2))
                if row % 2:
                    writer.seal()
            writer.fail(fake_sample(9).id, 9, "constant states", True)
    objects.create(f"shards/{shard_name(1, 7)}", b"nobody committed it")
    if kind == "repair":
        key = f"shards/{shard_name(1, 1)}"
        content = bytearray(objects.get(key))
        content[int(open_reader(here).entries()["offset"][6]) + 400] ^= 1  # row 3
        objects.replace(key, bytes(content))
        objects.remove([f"shards/{shard_name(1, 2)}"])
    kill_at(point)
    edit(here)


def intact(here, rows):
    reader = open_reader(here)
    found = dict(zip(reader.rows.tolist(), reader.generations.tolist()))
    assert found == {row: NEWEST[row] for row in found}
    entries = reader.entries()
    assert len(entries) == 2 * len(found)  # no segment twice
    for row in rows:
        assert same_records(reader.read(row, fake_sample(row).id), fake_record(row, NEWEST[row], 2))
    assert set(reader.failures) == {9}
    return set(found)


def check(point, told):
    here = f"{address}/{point}"
    stay = {0, 1, 2, 3, 5} if kind == "remove" else {0, 1, 2}
    found = intact(here, stay)
    assert stay <= found <= set(range(6))
    if kind == "remove":
        assert verify_objects(here) == []
    if point % 2:
        edit(here)
        assert intact(here, stay) == stay
        assert verify_objects(here) == []
    with opened(here, base / str(point)) as writer:  # capture goes on, whether or not it was asked for again
        missing = set(range(6)) - set(writer.committed)
        assert missing <= set(range(6)) - stay
        for row in missing:
            writer.add(fake_record(row, writer.generation, 2))
    edit(here) if kind == "repair" else remove_objects(here, (), superseded=True, lease_seconds=0.3)
    with opened(here, base / str(point)) as writer:
        assert writer.notes == [], writer.notes
        assert stay <= set(writer.committed) <= set(range(6))
        names = {f"shards/{shard_name(*key)}" for key, num_rows in writer._shards.items() if num_rows}
        for row in set(range(6)) - set(writer.committed):
            writer.add(fake_record(row, writer.generation, 2))
    assert names <= set(Objects(here).sizes("shards")) <= names | {f"shards/{shard_name(writer.generation, 0)}"}
    assert sorted(open_reader(here).rows.tolist()) == list(range(6))
    assert verify_objects(here) == []


print(killed_everywhere(child, check))
"""


EVERY = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("kind", "mode", "stride", "at_least"),
    [
        ("remove", "after", 6, 2),  # of the lease, of the commit
        ("repair", "before", 9, 2),  # the lease, the removal of the damaged shard
        *(pytest.param(k, m, 1, 11, marks=EVERY) for k in ("remove", "repair") for m in ("before", "after")),
    ],
)
def test_a_kill_at_any_request_of_a_change_loses_and_doubles_nothing(
    s3: S3, tmp_path: Path, kind: str, mode: str, stride: int, at_least: int
) -> None:
    words = [sys.executable, "-c", COMMON + EDITS, str(tmp_path), s3.address(), mode, str(stride), kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= at_least
