import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.lock import StoreLock, boot_id
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest

TAKE = "import sys; from pathlib import Path; from headrace.store.lock import StoreLock; StoreLock(Path(sys.argv[1]))"


def test_a_second_writer_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    with pytest.raises(StoreError, match=str(os.getpid())) as caught:
        StoreLock(tmp_path)
    assert boot_id() in str(caught.value)
    other = subprocess.run([sys.executable, "-c", TAKE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "StoreError" in other.stderr
    lock.release()
    subprocess.run([sys.executable, "-c", TAKE, str(tmp_path)], check=True)


def test_release_twice_is_fine_and_the_lock_is_free(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path)
    assert lock.held
    lock.release()
    lock.release()
    assert not lock.held
    StoreLock(tmp_path).release()


FORK = """
import os, sys, time
from pathlib import Path
from headrace.errors import StoreError
from headrace.store.lock import StoreLock
root = Path(sys.argv[1])
lock = StoreLock(root)
ready, done = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.write(ready[1], b"1" if lock.held else b"0")
    os.read(done[0], 1)
    os._exit(0)
assert os.read(ready[0], 1) == b"0", "the child thinks that it holds the lock"
try:
    StoreLock(root)
    raise SystemExit("the child took the parent's lock away")
except StoreError:
    pass
lock.release()
StoreLock(root)  # free, although the forked child still lives
os.write(done[1], b"x")
os.waitpid(child, 0)
"""


def test_a_forked_child_neither_holds_nor_frees_the_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], check=True)


STOPPED = """
import sys, time
from pathlib import Path
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record
with StoreWriter(Path(sys.argv[1]), fake_manifest(), 1 << 30, 1e9) as writer:
    for row in range(4):
        writer.add(fake_record(row, writer.generation))
        print(row, flush=True)
        sys.stdin.readline()
"""


def test_a_stopped_writer_keeps_the_lock_and_commits_once_when_it_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreError, match=str(process.pid)):
            StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9)
        process.send_signal(signal.SIGCONT)
        process.communicate("\n" * 4)
    assert process.returncode == 0
    reader = StoreReader(tmp_path)
    assert reader.rows.tolist() == list(range(4))
    assert len(reader.entries()) == 4
    with StoreWriter(tmp_path, fake_manifest(), 1 << 30, 1e9) as writer:
        assert (writer.generation, writer.notes) == (2, [])
