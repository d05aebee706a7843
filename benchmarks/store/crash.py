"""Kill -9 in every kind of step of a writer, and stop one past anybody's patience.

In: a folder for stores, how many kills a kind. Out: rows of claims, as JSON. Each writer is a process of its own that
kills itself before, in the middle of, or after one of its calls; another process then looks at what is left.

usage: crash.py FOLDER KILLS_A_KIND
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from work import NUM_TOKENS, Promise, check, open_writer, record, without_fsync, work

import headrace.files
import headrace.store.writer
from headrace.errors import StoreError
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.testing.states import fake_sample

KINDS = ["open", "write", "fsync", "rename", "folder fsync", "journal", "compaction"]
CYCLES = 8


class Trap:
    """Counts calls of each kind, and kills this process at one of them."""

    def __init__(self, kind: str = "", number: int = -1, when: str = "before") -> None:
        self.counts = dict.fromkeys(KINDS, 0)
        self._kind, self._number, self._when = kind, number, when
        self._names: dict[int, str] = {}
        self._compacting = False

    def install(self) -> None:
        """Wrap the calls a store makes."""
        self._open, self._write, self._fsync, self._replace = os.open, os.write, os.fsync, os.replace
        os.open, os.write, os.replace = self.open, self.write, self.replace  # type: ignore[assignment]
        os.fsync = self.fsync  # type: ignore[assignment]
        real = headrace.store.writer.rewrite_journal

        def compact(*args: Any) -> None:
            self._compacting = True
            real(*args)
            self._compacting = False

        headrace.store.writer.rewrite_journal = compact  # type: ignore[attr-defined]
        headrace.files.open = self.opened  # type: ignore[attr-defined]

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT or "shards" not in str(path):
            descriptor = self._open(path, flags, mode)
        else:
            descriptor = self._call("open", lambda: self._open(path, flags, mode))
        self._names[descriptor] = str(path)
        return descriptor

    def write(self, descriptor: int, content: Any) -> int:
        name = self._names.get(descriptor, "")
        kind = "journal" if name.endswith(".journal") else "write" if "shards" in name else ""

        def half() -> None:
            self._write(descriptor, bytes(content)[: len(content) // 2])

        return self._call(kind, lambda: self._write(descriptor, content), half)

    def fsync(self, descriptor: int) -> None:
        name = self._names.get(descriptor, "")
        kind = "journal" if name.endswith(".journal") else "folder fsync" if os.path.isdir(name) else "fsync"
        self._call(kind, lambda: None)

    def replace(self, source: Any, target: Any) -> None:
        self._call("rename", lambda: self._replace(source, target))

    def opened(self, path: Any, mode: str) -> "Opened":
        return Opened(self, path)

    def _call(self, kind: str, real: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if not kind:
            return real()
        kind = "compaction" if self._compacting else kind
        self.counts[kind] += 1
        if kind != self._kind or self.counts[kind] != self._number:
            return real()
        if self._when == "half" and half is not None:
            half()
        elif self._when == "after":
            real()
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class Opened:
    """A file opened for writing, on the wrapped calls."""

    def __init__(self, trap: Trap, path: Any) -> None:
        self._trap, self._path = trap, path

    def __enter__(self) -> "Opened":
        self._descriptor = self._trap._open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._trap._names[self._descriptor] = str(self._path) + ".journal"
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, content: bytes) -> int:
        return os.write(self._descriptor, content)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self._descriptor


def _child(root: Path, trap: Trap, pipe: int) -> None:
    say, status = os.write, 1

    def told(promise: Promise) -> None:
        say(pipe, json.dumps([list(promise.rows.items()), list(promise.failed)]).encode() + b"\n")

    try:
        trap.install()
        work(root, told, CYCLES, deaths=False)
        say(pipe, json.dumps(trap.counts).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def run(root: Path, trap: Trap) -> tuple[Promise, int, dict[str, int]]:
    """A writer in a forked process: its last promise, how it ended, its calls."""
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(root, trap, put)
    os.close(put)
    with os.fdopen(get, "rb") as pipe:
        lines = [json.loads(line) for line in pipe.read().split(b"\n")[:-1]]
    status = os.waitpid(pid, 0)[1]
    counts = lines.pop() if lines and isinstance(lines[-1], dict) else {}
    rows, failed = lines[-1] if lines else ([], [])
    return Promise(dict(rows), set(failed)), status, counts


def kills(base: Path, wanted: int) -> list[tuple[str, str, str, bool]]:
    """Kill at points of every kind, spread over the writer's life."""
    without_fsync()
    _, status, counts = run(base / "whole", Trap())
    assert status == 0, status
    rows = []
    for kind in KINDS:
        points = [(n, when) for n in range(1, counts[kind] + 1) for when in ("before", "half", "after")]
        step = max(1, len(points) / wanted)
        chosen = [points[int(k * step)] for k in range(min(wanted, len(points)))]
        bad = ""
        for number, when in chosen:
            root = base / "one"
            shutil.rmtree(root, ignore_errors=True)
            promise, status, _ = run(root, Trap(kind, number, when))
            try:
                assert os.WIFSIGNALED(status), f"not killed at {kind} {number}"
                check(root, promise)
            except (AssertionError, StoreError) as exc:
                bad = bad or f"; at call {number} ({when}): {exc}"
        told = f"{len(chosen)} kills, {'all held' if not bad else 'FAILED' + bad}"
        claim = f"kill -9 at {kind}: nothing committed lost, doubled or damaged; the next writer goes on"
        rows.append((claim, "at least 15 kills", told, not bad and len(chosen) >= 15))
    return rows


def stopped(base: Path) -> tuple[str, str, str, bool]:
    """SIGSTOP in the middle of writing: others are refused; after SIGCONT every row is there once."""
    root, said = base / "stopped", base / "said"
    pid = os.fork()
    if pid == 0:
        with open_writer(root) as writer:
            for row in range(60):
                writer.add(record(row, writer.generation))
                if row % 5 == 4:
                    writer.seal()
                said.write_text(str(row))
                time.sleep(0.01)
        os._exit(0)
    while not said.exists() or not said.read_text() or int(said.read_text()) < 17:
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    refused = 0
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            open_writer(root).close()
        except StoreError:
            refused += 1
        time.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    ended = os.waitpid(pid, 0)[1]
    reader = StoreReader(root)
    once = len(reader.entries()) == 2 * 60 and reader.rows.tolist() == list(range(60))
    right = all(reader.read(row, fake_sample(row, NUM_TOKENS).id).generation == 1 for row in range(60))
    holds = ended == 0 and refused >= 5 and once and right and verify(root) == []
    told = f"{refused} other writers refused while stopped, {reader.num_records} rows after, each once: {once}"
    return "SIGSTOP for 2 s and SIGCONT: nobody else writes, nothing is committed twice", "so", told, holds


def taken_over(base: Path) -> tuple[str, str, str, bool]:
    """SIGSTOP, then SIGKILL: the next writer has the lock at once and goes on."""
    root = base / "killed"
    pid = os.fork()
    if pid == 0:
        with open_writer(root) as writer:
            for row in range(3):
                writer.add(record(row, writer.generation))
            (base / "ready").write_text("x")
            time.sleep(600)
    while not (base / "ready").exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    check(root, Promise({0: 1, 1: 1, 2: 1}))
    return "stopped, then killed before it sealed: its 3 whole records are salvaged", "3 of 3", "3 of 3", True


def main(folder: Path, wanted: int) -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(dir=folder) as base:
        rows = [stopped(Path(base)), taken_over(Path(base)), *kills(Path(base), wanted)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
