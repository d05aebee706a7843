"""The log of a store of objects: which shards count, in which order.

In: journal blocks and failures of one writer. Out: commit objects, numbered without a gap, each created once: whoever
creates number n decides what n is. A writer begins with an opening commit, so that an earlier one which still believes
to be alive finds its next number taken. Layout: docs/formats/objects-1.md.
"""

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.errors import StoreError
from headrace.files import write_atomic
from headrace.record import DIGEST_BYTES, digest
from headrace.store import failures, journal
from headrace.store import manifest as manifests
from headrace.store.manifest import Manifest
from headrace.store.objects import IN_FLIGHT, Objects

FOLDER = "commits"
OPEN, ADD, FULL = 0, 1, 2
_HEAD = struct.Struct("<8sQQQ16sQQQ")
_MAGIC = b"HRCOMIT1"
_TRIES = 5  # a compaction may remove what was just listed


class LostLease(StoreError):
    """Another writer has taken over: nothing of this one counts any more."""


@dataclass(frozen=True)
class Commit:
    """One entry of the log.

    `manifest` is the text of manifest.json (of OPEN and FULL), `blocks` are journal blocks, `failed` lines of
    failures. FULL holds everything that counts: what is before it no longer does.
    """

    number: int
    kind: int
    generation: int
    nonce: bytes
    manifest: bytes = b""
    blocks: bytes = b""
    failed: bytes = b""

    def to_bytes(self) -> bytes:
        """The content of its object, which ends with a digest of all before it."""
        lengths = len(self.manifest), len(self.blocks), len(self.failed)
        head = _HEAD.pack(_MAGIC, self.kind, self.number, self.generation, self.nonce, *lengths)
        body = head + self.manifest + self.blocks + self.failed
        return body + digest(body)

    @classmethod
    def from_bytes(cls, content: bytes, number: int, where: str) -> "Commit":
        """Raises: StoreError for anything but the commit of this number as it was written."""
        body = memoryview(content)[:-DIGEST_BYTES]
        hint = "restore this object from a version or a copy; without it nobody knows what the store holds"
        if len(body) < _HEAD.size or digest(body) != content[-DIGEST_BYTES:]:
            raise StoreError(f"{where} as headrace wrote it", f"{len(content)} bytes of another digest", hint)
        magic, kind, own, generation, nonce, *lengths = _HEAD.unpack_from(body)
        if magic != _MAGIC or own != number or _HEAD.size + sum(lengths) != len(body):
            raise StoreError(f"{where} as commit {number} of version 1", f"{magic!r}, commit {own}", hint)
        ends = [_HEAD.size + sum(lengths[:k]) for k in range(4)]
        parts = [bytes(body[a:b]) for a, b in pairwise(ends)]
        return cls(number, kind, generation, nonce, *parts)


@dataclass(frozen=True)
class State:
    """What a log says: `last` is the number of its last commit, `removable` are commits that a FULL one would replace.

    `store` is drawn when a store begins; `generation` the highest of a writer that opened it.
    """

    store: bytes
    last: int
    generation: int
    manifest: bytes
    blocks: bytes
    failed: bytes
    removable: tuple[int, ...]

    def write(self, folder: Path) -> None:
        """Write it as a states folder without shards, the manifest last."""
        write_atomic(folder / journal.FILE_NAME, journal.HEADER + self.blocks)
        write_atomic(folder / failures.FILE_NAME, self.failed)
        write_atomic(folder / manifests.FILE_NAME, self.manifest)

    def stored_manifest(self, where: str) -> Manifest:
        """The manifest of the store. Raises: StoreError as Manifest.read."""
        return Manifest.parse(self.manifest, where)


class CommitLog:
    """The commits of one store. `num_since_full` counts those that a FULL one would replace."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._next = 0
        self._removable: list[int] = []

    @property
    def num_since_full(self) -> int:
        """Commits that a FULL one would replace."""
        return len(self._removable)

    def read(self) -> State | None:
        """What counts now; None where there is no store.

        Raises: StoreError naming a commit that is missing or damaged.
        """
        missing = ""
        for _ in range(_TRIES):
            numbers = sorted(int(key.rpartition("/")[2]) for key in self._objects.sizes(FOLDER))
            if not numbers:
                return None
            try:
                found = self._since_full(numbers)
                first = found[0] if found[0].number == 0 else self._get([0])[0]
            except FileNotFoundError as exc:
                missing = str(exc)
                continue
            self._next = found[-1].number + 1
            self._removable = [commit.number for commit in found if commit.kind != OPEN]
            return self._state(found, first)
        hint = "restore it from a version or a copy; without it nobody knows what the store holds"
        raise StoreError(f"every commit of {self._objects.address}", f"no {missing}", hint)

    def begin(self, generation: int, manifest: bytes) -> State:
        """Make the opening commit, behind what an earlier writer may still commit. Returns: what counts now.

        Raises: LostLease when a later writer has begun meanwhile.
        """
        for _ in range(_TRIES):
            state = self.read()
            if state is not None and state.generation >= generation:
                raise self._lost()
            try:
                self.append(OPEN, generation, manifest)
            except LostLease:
                continue
            began = self.read()
            assert began is not None
            return began
        raise self._lost()

    def append(
        self, kind: int, generation: int, manifest: bytes = b"", blocks: bytes = b"", failed: bytes = b""
    ) -> None:
        """Make the next commit.

        Raises: LostLease, with nothing committed, when its number is taken.
        """
        commit = Commit(self._next, kind, generation, os.urandom(16), manifest, blocks, failed)
        if not self._objects.create(_key(commit.number), commit.to_bytes()):
            raise self._lost()
        self._next += 1
        if kind != OPEN:
            self._removable.append(commit.number)

    def replace(self, generation: int, manifest: bytes, blocks: bytes, failed: bytes) -> None:
        """Commit everything that counts, then remove what that replaces; opening commits stay, to keep others out."""
        old = tuple(self._removable)
        self.append(FULL, generation, manifest, blocks, failed)
        self._objects.remove(map(_key, old))
        self._removable = [number for number in self._removable if number not in old]

    def _since_full(self, numbers: list[int]) -> list[Commit]:
        """Commits from the last FULL one on, or all; fetched from the end, because earlier ones may be many."""
        found: list[Commit] = []
        for end in range(len(numbers), 0, -IN_FLIGHT):
            found = self._get(numbers[max(end - IN_FLIGHT, 0) : end]) + found
            full = [k for k, commit in enumerate(found) if commit.kind == FULL]
            if full:
                found = found[full[-1] :]
                break
        first = found[0].number if found[0].kind == FULL else 0
        missing = sorted(set(range(first, numbers[-1])) - {commit.number for commit in found})
        if missing:
            # Between a list and the last FULL commit a compaction may have come; then the next list shows that.
            raise FileNotFoundError(_key(missing[0]))
        return found

    def _get(self, numbers: list[int]) -> list[Commit]:
        keys = [_key(number) for number in numbers]
        where = f"{self._objects.address}/"
        contents = zip(self._objects.get_all(keys), numbers, keys, strict=True)
        return [Commit.from_bytes(content, number, where + key) for content, number, key in contents]

    def _lost(self) -> LostLease:
        hint = "run it again when that writer has ended; records that are staged here are kept"
        return LostLease(f"to be the only writer of {self._objects.address}", "another one has taken over", hint)

    def _state(self, found: list[Commit], first: Commit) -> State:
        return State(
            store=first.nonce,
            last=found[-1].number,
            generation=max(commit.generation for commit in found),
            manifest=[commit.manifest for commit in found if commit.manifest][-1],
            blocks=b"".join(commit.blocks for commit in found),
            failed=b"".join(commit.failed for commit in found),
            removable=tuple(self._removable),
        )


def _key(number: int) -> str:
    return f"{FOLDER}/{number:010d}"
