"""Check every byte of a store that a reader would parse, and change none.

In: a states folder. Out: a list of what is damaged, each with file, offset and, where it is known, the row. What to do
about it: `repair`, or `StoreWriter.forget` for the rows that are captured again.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import StoreError
from headrace.record import digest
from headrace.store import failures, journal
from headrace.store.failures import read_failures
from headrace.store.journal import Journal, index_rows, scan_journal
from headrace.store.manifest import Manifest
from headrace.store.shard import Key, Rows, read_trailer, sealed_shards, shard_name

BASIS_NAME = "basis.safetensors"
READ_BYTES = 16 * 1024 * 1024
_SECONDS_TO_LIST = 2.0  # a writer seals a shard a moment before the journal names it

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """One place that is not as it was written; `row` -1: no record's own, `offset` -1: the whole file."""

    path: str
    offset: int
    row: int
    found: str


def verify(root: Path, progress: Progress | None = None, payloads: bool = True) -> list[Damage]:
    """Read the whole store, the digests of every message, index and line.

    Args:
        progress: called with (bytes done, bytes in all) of shards.
        payloads: False leaves the messages out, and checks all that says where they lie.
    Raises: StoreError when there is no readable manifest, or no folder of shards: then nothing else can be judged.
    """
    manifest = Manifest.read(root)
    found = verify_basis(root, manifest) + _verify_failures(root)
    names = {key: name for name, key in sealed_shards(root).items()}
    listed, damage = _verify_journal(root)
    found += damage
    sizes = {key: (root / "shards" / name).stat().st_size for key, name in names.items()}
    done = 0
    for key, name in names.items():
        found += verify_shard(root, name, rows_of(listed, key), payloads)
        done += sizes[key]
        if progress is not None:
            progress(done, sum(sizes.values()))
    for key in sorted(set(listed.starts) - set(names)):
        gone = rows_of(listed, key)
        found += [Damage(shard_name(*key), int(r["offset"]), int(r["row"]), "no such shard") for r in gone]
    if not damage and not set(names) <= set(listed.starts):
        time.sleep(_SECONDS_TO_LIST)
        late = set(names) - set(_verify_journal(root)[0].starts)
        found += [Damage(names[key], -1, -1, f"{journal.FILE_NAME} does not name this shard") for key in sorted(late)]
    return found


def verify_basis(root: Path, manifest: Manifest) -> list[Damage]:
    """Whether the basis that a manifest names is there, with its digest."""
    expected = manifest.codec.parameters.get("basis")
    if expected is None:
        return []
    try:
        found = digest((root / BASIS_NAME).read_bytes()).hex()
    except OSError as exc:
        return [Damage(BASIS_NAME, -1, -1, f"not readable: {exc.strerror}")]
    return [] if found == expected else [Damage(BASIS_NAME, -1, -1, f"digest {found}, not the manifest's {expected}")]


def _verify_failures(root: Path) -> list[Damage]:
    try:
        read_failures(root / failures.FILE_NAME)
    except StoreError as exc:
        return [Damage(failures.FILE_NAME, -1, -1, f"{exc.args[1]}, not {exc.args[0]}")]
    return []


def _verify_journal(root: Path) -> tuple[Journal, list[Damage]]:
    try:
        found = scan_journal(root / journal.FILE_NAME)
    except StoreError as exc:
        empty = Journal(np.zeros(0, journal.JOURNAL_DTYPE), {}, {}, (), torn=True)
        return empty, [Damage(journal.FILE_NAME, 0, -1, exc.args[1])]
    wrong = "a block whose digest does not match"
    return found, [Damage(journal.FILE_NAME, offset, -1, wrong) for offset in found.damaged_at]


def rows_of(listed: Journal, key: Key) -> Rows:
    """Index rows that the journal lists of a shard."""
    start, count = listed.starts.get(key, (0, 0))
    return index_rows(listed.rows[start : start + count])


def verify_shard(root: Path, name: str, listed: Rows, payloads: bool) -> list[Damage]:
    """One shard: its own index, whether the journal agrees with it, every message."""
    path, found = root / "shards" / name, []
    try:
        rows = read_trailer(path)
        own = {row.tobytes() for row in rows}
        strange = [row for row in listed if row.tobytes() not in own]
        found += [Damage(journal.FILE_NAME, -1, int(r["row"]), f"a row that {name} does not have") for r in strange]
    except StoreError as exc:
        rows = listed  # the journal still says where the messages lie
        found.append(Damage(name, -1, -1, exc.args[1]))
    return found + (list(_verify_messages(path, rows)) if payloads else [])


def _verify_messages(path: Path, rows: Rows) -> Iterator[Damage]:
    offsets, lengths, digests = rows["offset"].tolist(), rows["length"].tolist(), rows["digest"]
    try:
        with open(path, "rb") as shard:
            held, start = memoryview(b""), 0
            for k, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                if offset < start or offset + length > start + len(held):
                    held, start = memoryview(os.pread(shard.fileno(), max(READ_BYTES, length), offset)), offset
                message = held[offset - start : offset - start + length]
                if len(message) != length or digest(message) != bytes(digests[k]):
                    yield Damage(path.name, offset, int(rows["row"][k]), "a message whose digest does not match")
    except OSError as exc:
        yield Damage(path.name, -1, -1, f"not readable: {exc.strerror}")
