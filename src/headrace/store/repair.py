"""Take damaged shards out of a store and keep what is intact in them.

In: a states folder that nobody writes. Out: intact records in new shards, damaged shards in `quarantine/` with their
reason, damaged lines of failures there too, and the rows that are to be captured again, which capture then finds
missing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.files import fsync_folder, write_json
from headrace.store import failures, journal
from headrace.store.append import make_durable_folder
from headrace.store.index import RecordIndex
from headrace.store.journal import index_rows
from headrace.store.lock import StoreLock, disk_errors
from headrace.store.manifest import Manifest
from headrace.store.mend import copy_intact, mend
from headrace.store.shard import Rows, parse_shard_name, shard_name
from headrace.store.verify import Damage, Progress, verify


@dataclass(frozen=True)
class Repaired:
    """Rows that lost their newest record, and a sentence for each thing done."""

    rows: tuple[int, ...]
    notes: tuple[str, ...]


def repair(root: Path, payloads: bool = True, progress: Progress | None = None) -> Repaired:
    """Verify a store under its lock and repair it.

    Args:
        payloads: False reads no messages but those of shards whose own index is damaged: journal and indexes only.
        progress: called with (bytes done, bytes in all) of shards.
    Raises: StoreError when somebody writes to it, its manifest is damaged, it has no folder of shards, or the disk
    refuses.
    """
    Manifest.read(root)
    with disk_errors(root):
        lock = StoreLock(root)
        try:
            return _repair(root, payloads, progress)
        finally:
            lock.release()


def _repair(root: Path, payloads: bool, progress: Progress | None) -> Repaired:
    if (root / "quarantine").exists() and not (root / "quarantine").is_dir():
        raise StoreError(f"a folder at {root / 'quarantine'}", "a file", "move it away, then run store repair again")
    mended = mend(root)
    before = set(RecordIndex(mended.rows).rows.tolist())
    notes = [*mended.notes, *_mend_failures(root)]
    damages = verify(root, progress, payloads)
    for number, name in enumerate(sorted({d.path for d in damages if (root / "shards" / d.path).exists()})):
        new_name = shard_name(mended.last_generation + 1, number)
        notes.append(_replace_shard(root, mended.rows, name, new_name, [d for d in damages if d.path == name]))
    notes += [f"{d.path}: {d.found}" for d in damages if not (root / "quarantine" / d.path).exists()]
    if any(d.path == journal.FILE_NAME for d in damages):
        (root / journal.FILE_NAME).unlink(missing_ok=True)  # it disagrees with the shards, from which it is made anew
    rows = set(RecordIndex(mend(root).rows).rows.tolist())
    lost = {d.row for d in damages if d.row >= 0} | (before - rows)
    return Repaired(tuple(sorted(lost)), tuple(notes))


def reasons(damages: Sequence[Damage]) -> list[dict[str, int | str]]:
    """What lies beside a shard in quarantine: offset, row and what was found, of each damaged place."""
    return [{"offset": d.offset, "row": d.row, "found": d.found} for d in damages]


def _mend_failures(root: Path) -> list[str]:
    failures.mend_failures(root / failures.FILE_NAME)
    note = failures.set_aside(root / failures.FILE_NAME, root / "quarantine")
    return [] if note is None else [note]


def _replace_shard(root: Path, rows: Rows, name: str, new_name: str, damages: list[Damage]) -> str:
    old, quarantine = root / "shards" / name, root / "quarantine"
    generation, number = parse_shard_name(name) or (-1, -1)
    mine = rows[(rows["shard_generation"] == generation) & (rows["shard_number"] == number)]
    kept = copy_intact(old, index_rows(mine), root / "shards" / new_name)
    make_durable_folder(quarantine)
    write_json(quarantine / f"{name}.json", reasons(damages))
    os.replace(old, quarantine / name)
    fsync_folder(quarantine)
    fsync_folder(old.parent)
    return f"{name} is in quarantine; {kept} records in it were intact and are kept as {new_name}"
