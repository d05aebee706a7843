"""What a lock holder does to a store that a killed writer, or a bad disk, left behind.

In: a states folder under its lock. Out: every intact record sealed and indexed, and a sentence for each thing done.
Records of a torn shard are kept if each segment's bytes have the digest that the sidecar gives; nothing is guessed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.errors import StoreError
from headrace.files import fsync_folder
from headrace.record import digest
from headrace.store.index import RecordIndex
from headrace.store.journal import FILE_NAME, JOURNAL_DTYPE, Journal, journal_rows, rewrite_journal, scan_journal
from headrace.store.shard import (
    Key,
    Rows,
    ShardWriter,
    open_path,
    read_provenance,
    read_sidecar,
    read_trailer,
    sealed_shards,
    shard_files,
    shard_name,
    sidecar_path,
)


@dataclass(frozen=True)
class Mended:
    """Journal rows of everything that can be read, and what was done, in sentences.

    `shards` maps each shard that has a block in the journal to the rows in the shard itself.
    """

    rows: Rows
    shards: Mapping[Key, int]
    num_bytes: int
    last_generation: int
    notes: tuple[str, ...]


def mend(root: Path, elsewhere: Mapping[Key, int] = MappingProxyType({})) -> Mended:
    """Salvage open shards, index what no journal block names, drop blocks whose shard is gone. Needs the lock.

    Args: elsewhere: bytes of shards that are kept in another place than the folder.
    Raises: StoreError where there is no folder of shards.
    """
    shards = root / "shards"
    notes: list[str] = []
    unfinished = [name for name in shard_files(root) if ".arrow." in name]
    fsync_folder(shards)  # a rename that is seen here must be durable before what it replaced is removed
    for name in unfinished:
        if name.endswith(".arrow.open"):
            notes.append(_salvage(shards / name.removesuffix(".open")))
    for path in shards.glob("*.arrow.*") if unfinished else ():
        path.unlink()  # left by a kill between two renames; everything in it is sealed or salvaged by now
    names = {key: name for name, key in sealed_shards(root).items()}
    sizes = {key: os.stat(f"{shards}/{name}").st_size for key, name in names.items()}  # a Path costs ten times as much
    sizes.update(elsewhere)
    found = _readable_journal(root / FILE_NAME, notes)
    kept = _sound_blocks(found, sizes, notes)
    listed = set(kept)
    added = _unknown_shards(root, {key: name for key, name in names.items() if key not in listed}, notes)
    known = {**{key: found.shards[key] for key in kept}, **{key: len(index) for key, index in added.items()}}
    rows = found.rows
    if len(kept) != len(found.shards):
        spans = [found.starts[key] for key in kept]
        rows = np.concatenate([rows[:0], *(rows[start : start + count] for start, count in spans)])
    if added:
        rows = np.concatenate([rows, *(journal_rows(index, *key) for key, index in added.items())])
    if added or notes or found.torn or len(kept) != len(found.shards):
        rewrite_journal(root / FILE_NAME, rows, known)
    last = max([0, *(generation for generation, _ in sizes), int(rows["generation"].max(initial=0))])
    return Mended(rows, known, sum(sizes.values()), last, tuple(notes))


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
        writer = ShardWriter(path, {**_provenance(source), "copied_from": source.name})
        try:
            for k in range(len(rows)):
                row = rows[k : k + 1]
                writer.add_message(os.pread(shard.fileno(), int(row["length"][0]), int(row["offset"][0])), row)
            writer.seal()
        finally:
            writer.close()
    return len(whole)


def _provenance(source: Path) -> dict[str, Any]:
    try:
        return read_provenance(source)
    except StoreError:
        return {}


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


def _readable_journal(path: Path, notes: list[str]) -> Journal:
    try:
        found = scan_journal(path)
    except StoreError:
        notes.append(f"{path.name} had a damaged header and was made anew from the shards")
        return Journal(np.zeros(0, JOURNAL_DTYPE), {}, {}, (), torn=True)
    if found.damaged_at:
        notes.append(f"{path.name} was damaged at byte {found.damaged_at[0]} and is made anew from the shards")
    return found


def _sound_blocks(found: Journal, sizes: Mapping[Key, int], notes: list[str]) -> list[Key]:
    """Shards whose block points into a file which is there and long enough."""
    spans = [(key, start) for key, (start, count) in found.starts.items() if count]
    ends = dict.fromkeys(found.starts, 0)
    if spans:
        stops = found.rows["offset"] + found.rows["length"]
        highest = np.maximum.reduceat(stops, [start for _, start in spans]).tolist()
        ends.update({key: end for (key, _), end in zip(spans, highest, strict=True)})
    kept = [key for key, end in ends.items() if end <= sizes.get(key, -1)]
    gone = [key for key, _ in spans if ends[key] > sizes.get(key, -1)]
    notes.extend(f"{shard_name(*key)} is gone or cut short; its records are to be captured again" for key in gone)
    return kept


def _unknown_shards(root: Path, names: Mapping[Key, str], notes: list[str]) -> dict[Key, Rows]:
    """Index rows of sealed shards without a sound block, from their own indexes."""
    added: dict[Key, Rows] = {}
    for key, name in sorted(names.items()):
        try:
            added[key] = read_trailer(root / "shards" / name)
        except StoreError as exc:
            notes.append(f"the index of {name} cannot be read ({exc.args[1]}); no record of it is listed")
    return added
