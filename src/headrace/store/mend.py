"""What a lock holder does to a store that a killed writer, or a bad disk, left behind.

In: a states folder under its lock. Out: every intact record sealed and indexed, and a sentence for each thing done.
Records of a torn shard are kept if each segment's bytes have the digest that the sidecar gives; nothing is guessed.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import StoreError
from headrace.files import fsync_folder
from headrace.record import digest
from headrace.store.index import RecordIndex
from headrace.store.journal import (
    FILE_NAME,
    HEADER,
    JOURNAL_DTYPE,
    ROW_BYTES,
    journal_rows,
    rewrite_journal,
    scan_journal,
)
from headrace.store.shard import (
    Rows,
    ShardWriter,
    open_path,
    read_sidecar,
    read_trailer,
    sealed_shards,
    shard_name,
    sidecar_path,
)

Key = tuple[int, int]


@dataclass(frozen=True)
class Mended:
    """Journal rows of everything that can be read, the last generation seen, and what was done, in sentences."""

    rows: Rows
    last_generation: int
    notes: tuple[str, ...]


def mend(root: Path) -> Mended:
    """Salvage open shards, index what no journal row names, drop rows whose shard is gone. Needs the lock.

    Raises: StoreError where there is no folder of shards.
    """
    shards = root / "shards"
    notes: list[str] = []
    for path in sorted(shards.glob("*.arrow.open")):
        notes.append(_salvage(path.with_name(path.name.removesuffix(".open"))))
    for path in shards.glob("*.arrow.*"):
        path.unlink()  # left by a kill between two renames; everything in it is sealed or salvaged by now
    sizes = {key: (shards / name).stat().st_size for name, key in sealed_shards(root).items()}
    stored, found = _readable_journal(root / FILE_NAME, notes)
    rows = _drop_dangling(found, sizes, notes)
    rows = _index_unknown(root, rows, sizes, notes)
    if len(rows) != stored or notes:
        rewrite_journal(root / FILE_NAME, rows)
    last = max([0, *(generation for generation, _ in sizes), *(int(g) for g in rows["generation"])])
    return Mended(rows, last, tuple(notes))


def copy_intact(source: Path, rows: Rows, path: Path) -> int:
    """Seal, as shard `path`, the records of `source` whose every segment has the digest of its index row.

    Args: rows: INDEX_DTYPE, where the segments lie in `source`.
    Returns: how many records; for none, no shard is made.
    """
    with open(source, "rb") as shard:
        messages = (os.pread(shard.fileno(), int(row["length"]), int(row["offset"])) for row in rows)
        good = [digest(message) == bytes(row["digest"]) for message, row in zip(messages, rows, strict=True)]
        rows = rows[np.array(good, np.bool_)]
        whole = set(RecordIndex(journal_rows(rows, 0, 0)).rows.tolist())
        rows = rows[np.array([row in whole for row in rows["row"].tolist()], np.bool_)]
        if not len(rows):
            return 0
        writer = ShardWriter(path, {"copied_from": source.name})
        try:
            for k in range(len(rows)):
                row = rows[k : k + 1]
                writer.add_message(os.pread(shard.fileno(), int(row["length"][0]), int(row["offset"][0])), row)
            writer.seal()
        finally:
            writer.close()
    return len(whole)


def _salvage(path: Path) -> str:
    """Seal what is intact of the open shard that was to become `path`."""
    opened, sidecar = open_path(path), sidecar_path(path)
    if path.exists():
        note = f"{path.name} was salvaged before; what was left of its writing is removed"
    else:
        temporary = path.with_name(path.name + ".tmp")
        for leftover in path.parent.glob(temporary.name + "*"):
            leftover.unlink()
        kept = copy_intact(opened, read_sidecar(sidecar), temporary)
        if kept:
            os.replace(temporary, path)
            fsync_folder(path.parent)
        note = f"{path.name} was never sealed; {kept} records in it were intact and are kept"
    opened.unlink()
    sidecar.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return note


def _readable_journal(path: Path, notes: list[str]) -> tuple[int, Rows]:
    """Number of whole rows that a clean journal would hold, and the good ones of them."""
    try:
        rows, good = scan_journal(path)
    except StoreError:
        notes.append(f"{path.name} had a damaged header and was made anew from the shards")
        return 0, np.zeros(0, JOURNAL_DTYPE)
    if not good.all():
        notes.append(f"{int((~good).sum())} damaged rows of {path.name} were made anew from the shards")
    torn = path.exists() and path.stat().st_size != len(HEADER) + len(rows) * ROW_BYTES
    return -1 if torn else len(rows), rows[good]


def _drop_dangling(rows: Rows, sizes: dict[Key, int], notes: list[str]) -> Rows:
    """Rows that point into a shard which is there and long enough."""
    keys = zip(rows["shard_generation"].tolist(), rows["shard_number"].tolist(), strict=True)
    ends = rows["offset"] + rows["length"]
    there = np.array([int(end) <= sizes.get(key, -1) for key, end in zip(keys, ends, strict=True)], np.bool_)
    gone = {shard_name(int(r["shard_generation"]), int(r["shard_number"])) for r in rows[~there]}
    notes.extend(f"{name} is gone or cut short; its records are to be captured again" for name in sorted(gone))
    return rows[there]


def _index_unknown(root: Path, rows: Rows, sizes: dict[Key, int], notes: list[str]) -> Rows:
    """Add rows of sealed shards that the journal does not name, or names in part."""
    known: dict[Key, int] = {}
    for key in zip(rows["shard_generation"].tolist(), rows["shard_number"].tolist(), strict=True):
        known[key] = known.get(key, 0) + 1
    added = [rows]
    for key in sorted(sizes):
        path = root / "shards" / shard_name(*key)
        try:
            index = read_trailer(path)
        except StoreError as exc:
            notes.append(f"the index of {path.name} cannot be read ({exc.args[1]}); rows of the journal are kept")
            continue
        if len(index) != known.get(key, 0):
            added.append(journal_rows(index, *key))
    return np.concatenate(added)
