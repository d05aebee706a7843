"""Check every byte of a store that a reader would parse, and change none.

In: a states folder. Out: a list of what is damaged, each with file, offset and, where it is known, the row. What to do
about it: `repair`, or `StoreWriter.forget` for the rows that are captured again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.record import digest
from headrace.store import failures, journal
from headrace.store.failures import read_failures
from headrace.store.journal import scan_journal
from headrace.store.manifest import Manifest
from headrace.store.shard import read_trailer, sealed_shards, shard_name


@dataclass(frozen=True)
class Damage:
    """One place that is not as it was written. `row` is -1 where it is no record's."""

    path: str
    offset: int
    row: int
    found: str


def verify(root: Path, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Read the whole store, the digests of every message, index and line.

    Args:
        progress: called with (shards done, shards in all).
    Raises: StoreError when there is no readable manifest, or no folder of shards: then nothing else can be judged.
    """
    Manifest.read(root)
    found: list[Damage] = []
    for name, read in ((failures.FILE_NAME, read_failures), (journal.FILE_NAME, journal.read_journal)):
        try:
            read(root / name)
        except StoreError as exc:
            found.append(Damage(name, -1, -1, exc.args[1]))
    names = sealed_shards(root)
    for done, name in enumerate(names, start=1):
        found += _verify_trailer(root, name)
        if progress is not None:
            progress(done, len(names))
    return found + _verify_messages(root)


def _verify_trailer(root: Path, name: str) -> list[Damage]:
    try:
        read_trailer(root / "shards" / name)
    except StoreError as exc:
        return [Damage(name, -1, -1, exc.args[1])]
    return []


def _verify_messages(root: Path) -> list[Damage]:
    """Every message that a good journal row names, superseded ones too."""
    try:
        rows, good = scan_journal(root / journal.FILE_NAME)
    except StoreError:
        return []  # told already, with its reason
    found = []
    for row in rows[good]:
        name = shard_name(int(row["shard_generation"]), int(row["shard_number"]))
        offset = int(row["offset"])
        wrong = _wrong(root / "shards" / name, offset, int(row["length"]), bytes(row["digest"]))
        if wrong:
            found.append(Damage(name, offset, int(row["row"]), wrong))
    return found


def _wrong(path: Path, offset: int, length: int, expected: bytes) -> str:
    try:
        with open(path, "rb") as shard:
            message = os.pread(shard.fileno(), length, offset)
    except OSError as exc:
        return f"no readable shard: {exc.strerror}"
    return "" if digest(message) == expected else "a message whose digest does not match"
