"""Power loss: record every file operation of a writer, then make up what a disk may hold after a cut at each of them.

In: a folder, how many states to draw at each operation, every how many operations to cut. Out: rows of claims, as
JSON. The model is harsher than common file systems. Of what was not yet fsynced, any subset may have reached the disk:
pieces of 512 bytes of written data, sizes without their data, and, of each folder whose fsync is still to come, any of
its creations, renames and removals, in the order they were made. The fsync of a file keeps its content, not its name.

usage: power.py FOLDER STATES_A_CUT EVERY
"""

import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from work import Promise, check, without_fsync, work

import headrace.files
from headrace.errors import StoreError

PIECE = 512
MODES = ("nothing unsynced", "all of it", "names, no data", "data, no names")


@dataclass
class Op:
    """One operation. `file` is a number that stays with the content whatever its name; folders are paths."""

    kind: str
    file: int = -1
    offset: int = 0
    content: bytes = b""
    folder: str = ""
    changes: tuple[tuple[str, int | None], ...] = ()  # names in `folder`, None: gone; -2: a folder
    promise: Promise | None = None


@dataclass
class Recorder:
    """Wraps the calls a store makes, and does them too."""

    base: Path
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names: dict[str, int] = {}
        self._open_files: dict[int, tuple[int | str, bool]] = {}
        self._sizes: dict[int, int] = {}
        self._at: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in CALLS}

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, getattr(self, name))
        headrace.files.open = self.opened  # type: ignore[attr-defined]

    def remove(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        del headrace.files.open  # type: ignore[attr-defined]

    def told(self, promise: Promise) -> None:
        self.ops.append(Op("promise", promise=promise))

    def _split(self, path: Any) -> tuple[str, str]:
        folder, name = os.path.split(os.path.relpath(path, self.base))
        return folder, name

    def _ours(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fspath(path).startswith(str(self.base))

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        new = self._ours(path) and flags & os.O_CREAT and not os.path.exists(path)
        descriptor: int = self._real["open"](path, flags, *rest, **more)
        if not self._ours(path):
            return descriptor
        key = os.path.relpath(path, self.base)
        if os.path.isdir(path):
            self._open_files[descriptor] = "" if key == "." else key, False
            return descriptor
        if new:
            self._names[key] = len(self._sizes)
            self._sizes[self._names[key]] = 0
            folder, name = self._split(path)
            self.ops.append(Op("names", folder=folder, changes=((name, self._names[key]),)))
        self._open_files[descriptor] = self._names[key], bool(flags & os.O_APPEND)
        self._at[descriptor] = 0
        if flags & os.O_TRUNC and not new:
            self._cut(self._names[key], 0)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open_files.pop(descriptor, None)
        self._real["close"](descriptor)

    def write(self, descriptor: int, content: Any) -> int:
        if descriptor in self._open_files:
            file, appends = self._open_files[descriptor]
            assert isinstance(file, int)
            offset = self._sizes[file] if appends else self._at[descriptor]
            self.ops.append(Op("write", file, offset, bytes(content)))
            self._at[descriptor] = offset + len(content)
            self._sizes[file] = max(self._sizes[file], self._at[descriptor])
        written: int = self._real["write"](descriptor, content)
        return written

    def ftruncate(self, descriptor: int, size: int) -> None:
        file = self._open_files[descriptor][0]
        assert isinstance(file, int)
        self._cut(file, size)
        self._real["ftruncate"](descriptor, size)

    def _cut(self, file: int, size: int) -> None:
        self._sizes[file] = size
        self.ops.append(Op("cut", file, size))

    def fsync(self, descriptor: int) -> None:
        what = self._open_files.get(descriptor, ("", False))[0]
        self.ops.append(Op("fsync", what) if isinstance(what, int) else Op("fsync folder", folder=what))

    def replace(self, source: Any, target: Any) -> None:
        (a, old), (b, new) = self._split(source), self._split(target)
        file = self._names.pop(os.path.relpath(source, self.base))
        self._names[os.path.relpath(target, self.base)] = file
        if a == b:
            self.ops.append(Op("names", folder=a, changes=((new, file), (old, None))))
        else:
            self.ops += [Op("names", folder=b, changes=((new, file),)), Op("names", folder=a, changes=((old, None),))]
        self._real["replace"](source, target)

    def unlink(self, path: Any, **more: Any) -> None:
        if self._ours(path):
            folder, name = self._split(path)
            self._names.pop(os.path.relpath(path, self.base), None)
            self.ops.append(Op("names", folder=folder, changes=((name, None),)))
        self._real["unlink"](path, **more)

    def mkdir(self, path: Any, *rest: Any, **more: Any) -> None:
        self._real["mkdir"](path, *rest, **more)
        if self._ours(path):
            folder, name = self._split(path)
            self.ops.append(Op("names", folder=folder, changes=((name, -2),)))

    def opened(self, path: Any, mode: str) -> io.RawIOBase:
        return _Opened(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))


CALLS = ("open", "close", "write", "ftruncate", "fsync", "replace", "unlink", "mkdir")


class _Opened(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, content: Any) -> int:
        return os.write(self._descriptor, content)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def after_cut(ops: list[Op], keep: Callable[[str], bool], whole_size: Callable[[], bool]) -> dict[str, bytes | None]:
    """Files (content) and folders (None) by path, when the power went after `ops`."""
    data_synced, names_synced = _synced(ops)
    files: dict[int, bytearray] = {}
    names: dict[str, dict[str, int]] = {}
    for k, op in enumerate(ops):
        if op.kind in ("write", "cut"):
            content = files.setdefault(op.file, bytearray())
            _apply(op, content, data_synced.get(op.file, -1) > k, keep, whole_size)
        elif op.kind == "names" and (names_synced.get(op.folder, -1) > k or keep("names")):
            for name, file in op.changes:
                if file is None:
                    names.setdefault(op.folder, {}).pop(name, None)
                else:
                    names.setdefault(op.folder, {})[name] = file
    return _tree("", names, files)


def _synced(ops: list[Op]) -> tuple[dict[int, int], dict[str, int]]:
    """Index of the last fsync of each file and folder."""
    data = {op.file: k for k, op in enumerate(ops) if op.kind == "fsync"}
    return data, {op.folder: k for k, op in enumerate(ops) if op.kind == "fsync folder"}


def _apply(op: Op, content: bytearray, synced: bool, keep: Callable[[str], bool], whole: Callable[[], bool]) -> None:
    if op.kind == "cut":
        if synced or keep("data"):
            del content[op.offset :]
        return
    end = op.offset + len(op.content)
    start = op.offset
    if not synced and keep("names") and whole():
        content.extend(bytes(max(0, end - len(content))))  # the size is there, of the content what follows
    while start < end:
        stop = min(end, (start // PIECE + 1) * PIECE)
        if synced or keep("data"):
            content.extend(bytes(max(0, stop - len(content))))
            content[start:stop] = op.content[start - op.offset : stop - op.offset]
        start = stop


def _tree(folder: str, names: dict[str, dict[str, int]], files: dict[int, bytearray]) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name, file in names.get(folder, {}).items():
        path = os.path.join(folder, name)
        if file == -2:
            found[path] = None
            found.update(_tree(path, names, files))
        else:
            found[path] = bytes(files.get(file, b""))
    return found


def draws(seed: int, mode: str) -> tuple[Callable[[str], bool], Callable[[], bool]]:
    """What is kept of what was not synced."""
    rng = random.Random(seed)
    if mode == "nothing unsynced":
        return lambda _: False, lambda: False
    if mode == "all of it":
        return lambda _: True, lambda: True
    if mode == "names, no data":
        return lambda what: what == "names", lambda: rng.random() < 0.5
    if mode == "data, no names":
        return lambda what: what == "data", lambda: False
    share = rng.random()
    return lambda _: rng.random() < share, lambda: rng.random() < 0.5


def replay(ops: list[Op], base: Path, num_random: int, every: int) -> tuple[int, int, str]:
    """Check states at cuts. Returns: states, those in which a reader alone refused, what went wrong first."""
    states = refused = 0
    promise, seen = Promise(), set()
    for k, op in enumerate(ops, 1):
        promise = op.promise or promise
        if k % every and op.kind != "promise":
            continue
        for seed, mode in enumerate([*MODES, *["drawn"] * num_random]):
            tree = after_cut(ops[:k], *draws(1000 * k + seed, mode))
            key = hash((tuple(sorted(tree.items(), key=lambda item: item[0])), tuple(promise.rows.items())))
            if key in seen:
                continue
            seen.add(key)
            root = base / "one"
            shutil.rmtree(root, ignore_errors=True)
            _materialise(root, tree)
            states += 1
            try:
                refused += not check(root / "run" / "states", promise)
            except (AssertionError, StoreError, OSError) as exc:
                return states, refused, f"after operation {k} ({op.kind}), {mode}: {exc}"
    return states, refused, ""


def _materialise(root: Path, tree: dict[str, bytes | None]) -> None:
    root.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def record(base: Path) -> list[Op]:
    """The operations of one writer's life."""
    recorder = Recorder(base)
    recorder.install()
    try:
        work(base / "run" / "states", recorder.told)
    finally:
        recorder.remove()
    return recorder.ops


def main(folder: Path, num_random: int, every: int) -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        base = Path(name).resolve()
        (base / "recorded").mkdir()
        ops = record(base / "recorded")
        without_fsync()
        states, refused, wrong = replay(ops, base, num_random, every)
        claim = f"power loss at every {every}. of {len(ops)} operations: nothing committed lost, doubled or damaged"
        told = f"{states} states, {'all held' if not wrong else 'FAILED ' + wrong}; a reader alone refused {refused}"
        rows = [(claim, "all states hold, a writer goes on by itself", told, not wrong)]
        for left_out in ("fsync", "fsync folder"):
            fewer = [op for op in ops if op.kind != left_out]
            wrong = replay(fewer, base, num_random, every)[2]
            rows.append((f"the same without any {left_out}, so that the check can fail", "fails", wrong, bool(wrong)))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
