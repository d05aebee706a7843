"""kill -9 of a writer before and after every request that changes the store, and what is left.

The driver forks a writer that kills itself there, and a checker that goes on in the same folder or on another machine.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.conftest import S3

DRIVER = """
import os, signal, sys, threading
from pathlib import Path
from headrace.store import remote_writer
from headrace.store.objects import Objects
from headrace.store.remote import open_reader
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

base, address, mode, stride = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
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

    for name in ["create", "replace", "remove", "abort_uploads"]:
        setattr(Objects, name, wrap(getattr(Objects, name)))


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


def check(point, rows, failed):
    here = f"{address}/{point}"
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


def run_writer(point):  # what it said was safe, and how it ended
    get, put = os.pipe()
    pid = forked(writer_child, point, put)
    os.close(put)
    told = b""
    while part := os.read(get, 65536):
        told += part
    os.close(get)
    done = [part.split(";") for part in told.decode().split("|")[:-1]]
    return ([eval(x) for x in done[-1]] if done else [[], []]), os.waitpid(pid, 0)[1]


point, killed = 1 - stride, 0
while True:
    point += stride
    safe, status = run_writer(point)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    _, status = os.waitpid(forked(check, point, *safe), 0)
    assert status == 0, ("killed at request", point)
    killed += 1
print(killed)
"""


@pytest.mark.parametrize(
    ("stride", "at_least"), [(5, 5), pytest.param(1, 22, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_kill_at_any_request_loses_nothing_that_was_sealed(
    s3: S3, tmp_path: Path, mode: str, stride: int, at_least: int
) -> None:
    words = [sys.executable, "-c", DRIVER, str(tmp_path), s3.address(), mode, str(stride)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= at_least  # requests at which a writer was killed
