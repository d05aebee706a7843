"""A writer killed with -9 before each of its system calls, in the middle of each write, and while it mends.

A driver process forks a writer for every point; the writer kills itself there; the driver looks at what is left.
"""

import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import os, shutil, signal, sys
from pathlib import Path
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

base, mode = Path(sys.argv[1]), sys.argv[2]
CALLS = ["write", "replace", "unlink", "ftruncate", "fsync"]
SEGMENTS = 2


def write_twice(root, told):
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        for row in range(4):
            writer.add(fake_record(row, writer.generation, SEGMENTS))
            if row % 2:
                writer.seal()
                told(writer)
        writer.fail(fake_sample(9).id, 9, "constant states", True)
        told(writer)
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.add(fake_record(1, writer.generation, SEGMENTS))
        writer.add(fake_record(4, writer.generation, SEGMENTS))
        writer.seal()
        told(writer)
        writer.add(fake_record(5, writer.generation, SEGMENTS))


def kill_at(point):
    count = 0

    def wrap(name, real):
        def call(*args):
            nonlocal count
            count += 1
            if count == point:
                if mode == "half" and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # A kill leaves the page cache alone, so the real fsync would only cost time here.
            return None if name == "fsync" else real(*args)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def leave_torn_store(root, told):
    # As after a kill while the rows of the second shard went into the journal, and another one in the third shard.
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        writer.add(fake_record(0, writer.generation, SEGMENTS))
        writer.seal()
        told(writer)
        writer.add(fake_record(1, writer.generation, SEGMENTS))
        writer.seal()
        writer.add(fake_record(2, writer.generation, SEGMENTS))
        writer.add(fake_record(3, writer.generation, SEGMENTS))
        os.truncate(root / "index.journal", 300)
        os.kill(os.getpid(), signal.SIGKILL)


def mend_torn_store(root, told):
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        told(writer)


def child(root, point, pipe):
    say = os.write

    def told(writer):
        rows = sorted((row, generation) for row, (_, generation) in writer.committed.items())
        say(pipe, f"{rows};{sorted(writer.failed)}|".encode())

    if point > 0:
        kill_at(point)
    act = leave_torn_store if point == 0 else mend_torn_store if mode == "mend" else write_twice
    act(root, told)
    os._exit(0)


def promised(text):
    done = [part.split(";") for part in text.split("|")[:-1]]
    return [eval(x) for x in done[-1]] if done else [[], []]


def check(root, rows, failed):
    if (root / "manifest.json").exists():  # killed before that, there is no store yet
        reader = StoreReader(root)
        found = {int(r): int(g) for r, g in zip(reader.rows, reader._index.generations)}
        for row, generation in rows:
            assert found.get(row, 0) >= generation, ("a sealed record is lost", row, found)
        assert set(failed) <= set(reader.failures)
        for row, generation in found.items():
            assert same_records(reader.read(row, fake_sample(row).id), fake_record(row, generation, SEGMENTS))
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        for row, generation in rows:
            assert writer.committed[row][1] >= generation
        assert set(failed) <= set(writer.failed)
        for row in set(range(6)) - set(writer.committed):
            writer.add(fake_record(row, writer.generation, SEGMENTS))
    reader = StoreReader(root)
    assert reader.rows.tolist() == list(range(6))
    assert verify(root) == []
    assert all(p.name.endswith(".arrow") for p in (root / "shards").iterdir())
    with StoreWriter(root, fake_manifest(), 1 << 30, 1e9) as writer:
        assert writer.notes == [], writer.notes


def run_child(root, point):  # what the child said was safe, and how it ended
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(root, point, put)
    os.close(put)
    told = b""
    while part := os.read(get, 65536):
        told += part
    os.close(get)
    return promised(told.decode()), os.waitpid(pid, 0)[1]


os.fsync = lambda descriptor: None
torn, point = base / "torn", 0
(rows, failed), _ = run_child(torn, 0)
while True:
    point += 1
    root = base / str(point)
    if mode == "mend":
        shutil.copytree(torn, root)
        _, status = run_child(root, point)
        safe = rows, failed
    else:
        safe, status = run_child(root, point)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    try:
        check(root, *safe)
    except BaseException:
        print("killed at call", point, file=sys.stderr)
        raise
    shutil.rmtree(root)
print(point - 1)
"""


@pytest.mark.parametrize(("mode", "at_least"), [("before", 60), ("half", 60), ("mend", 15)])
def test_a_kill_at_any_system_call_loses_nothing_that_was_sealed(tmp_path: Path, mode: str, at_least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), mode], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least  # points at which a writer was killed
