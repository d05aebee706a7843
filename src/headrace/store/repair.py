"""Take damaged shards out of a store and keep what is intact in them.

In: a states folder that nobody writes. Out: intact records in new shards, damaged shards in `quarantine/` with their
reason, damaged lines of failures there too, and the rows that are to be captured again, which capture then finds
missing.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.files import fsync_folder, write_json
from headrace.store import failures
from headrace.store.lock import StoreLock, disk_errors
from headrace.store.manifest import Manifest
from headrace.store.mend import copy_intact, mend
from headrace.store.shard import INDEX_DTYPE, Rows, parse_shard_name, shard_name
from headrace.store.verify import Damage, verify


@dataclass(frozen=True)
class Repaired:
    """Rows that lost their newest record, and a sentence for each thing done."""

    rows: tuple[int, ...]
    notes: tuple[str, ...]


def repair(root: Path) -> Repaired:
    """Verify a store under its lock and repair it.

    Raises: StoreError when somebody writes to it, its manifest is damaged, it has no folder of shards, or the disk
    refuses.
    """
    Manifest.read(root)
    with disk_errors(root):
        lock = StoreLock(root)
        try:
            return _repair(root)
        finally:
            lock.release()


def _repair(root: Path) -> Repaired:
    if (root / "quarantine").exists() and not (root / "quarantine").is_dir():
        raise StoreError(f"a folder at {root / 'quarantine'}", "a file", "move it away, then run store repair again")
    mended = mend(root)
    notes = [*mended.notes, *_mend_failures(root)]
    damages = verify(root)
    for number, name in enumerate(sorted({d.path for d in damages if (root / "shards" / d.path).exists()})):
        new_name = shard_name(mended.last_generation + 1, number)
        notes.append(_replace_shard(root, mended.rows, name, new_name, [d for d in damages if d.path == name]))
    notes += [f"{d.path}: {d.found}" for d in damages if not (root / "quarantine" / d.path).exists()]
    mend(root)
    return Repaired(tuple(sorted({d.row for d in damages if d.row >= 0})), tuple(notes))


def _mend_failures(root: Path) -> list[str]:
    failures.mend_failures(root / failures.FILE_NAME)
    note = failures.set_aside(root / failures.FILE_NAME, root / "quarantine")
    return [] if note is None else [note]


def _replace_shard(root: Path, rows: Rows, name: str, new_name: str, damages: list[Damage]) -> str:
    old, quarantine = root / "shards" / name, root / "quarantine"
    generation, number = parse_shard_name(name) or (-1, -1)
    mine = rows[(rows["shard_generation"] == generation) & (rows["shard_number"] == number)]
    kept = copy_intact(old, mine[list(INDEX_DTYPE.names or ())].astype(INDEX_DTYPE), root / "shards" / new_name)
    quarantine.mkdir(exist_ok=True)
    write_json(quarantine / f"{name}.json", [{"offset": d.offset, "row": d.row, "found": d.found} for d in damages])
    os.replace(old, quarantine / name)
    fsync_folder(quarantine)
    fsync_folder(old.parent)
    return f"{name} is in quarantine; {kept} records in it were intact and are kept as {new_name}"
