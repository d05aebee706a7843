"""Take records out of a store for good.

In: rows of the prepared set, or all that newer records supersede. Out: the shards that held them, written anew without
them; the bytes are free again, and capture finds the rows missing. Whatever else the shards hold is copied only when
every byte of it is as it was written. A removal that was killed is done by asking again.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import StoreError
from headrace.files import fsync_folder
from headrace.record import digest
from headrace.store.index import RecordIndex
from headrace.store.lock import StoreLock, disk_errors
from headrace.store.manifest import Manifest
from headrace.store.mend import Mended, copy_intact, mend
from headrace.store.shard import Rows, read_trailer, sealed_shards, shard_name


@dataclass(frozen=True)
class Removed:
    """How many segments went, of how many shards, and by how many bytes the shards are smaller."""

    num_segments: int
    num_shards: int
    freed_bytes: int


def remove(root: Path, rows: Collection[int], superseded: bool = False) -> Removed:
    """Remove every generation of these rows and, if asked, whatever newer records supersede.

    Raises: StoreError, with nothing changed, for a row without a record, for damage in a shard that is to be written
    anew, and when somebody else writes.
    """
    Manifest.read(root)
    with disk_errors(root):
        lock = StoreLock(root)
        try:
            mended = mend(root)
            return _remove(root, mended, Wish.of(mended.rows, rows, superseded, str(root)))
        finally:
            lock.release()


@dataclass(frozen=True)
class Wish:
    """What is to go: every record of `rows`, and, unless that is None, all but (row, generation) of `newest`."""

    rows: frozenset[int]
    newest: frozenset[tuple[int, int]] | None

    @classmethod
    def of(cls, stored: Rows, rows: Collection[int], superseded: bool, where: str) -> "Wish":
        """Args: stored: JOURNAL_DTYPE, all that counts. Raises: StoreError for a row without a record there."""
        index = RecordIndex(stored)
        unknown = sorted(set(rows) - set(index.rows.tolist()))
        if unknown:
            found = f"none of {', '.join(map(str, unknown[:8]))}"
            raise StoreError(f"records of the rows named in {where}", found, "headrace store ls shows them")
        newest = frozenset(zip(index.rows.tolist(), index.generations.tolist(), strict=True))
        return cls(frozenset(rows), newest if superseded else None)

    def kept(self, index: Rows) -> npt.NDArray[np.bool_]:
        """bool [S]: which of some segments stay."""
        keys = zip(index["row"].tolist(), index["generation"].tolist(), strict=True)
        kept = [key[0] not in self.rows and (self.newest is None or key in self.newest) for key in keys]
        return np.array(kept, np.bool_)


def _remove(root: Path, mended: Mended, wish: Wish) -> Removed:
    plan: list[tuple[str, Rows, int]] = []
    for name in sealed_shards(root):
        index = read_trailer(root / "shards" / name)
        kept = wish.kept(index)
        if not kept.all():
            check_intact(root / "shards" / name, index[kept])
            plan.append((name, index[kept], int((~kept).sum())))
    freed = 0
    for number, (name, kept_rows, _) in enumerate(plan):
        old, new = root / "shards" / name, root / "shards" / shard_name(mended.last_generation + 1, number)
        freed += old.stat().st_size
        if copy_intact(old, kept_rows, new):
            freed -= new.stat().st_size
        os.unlink(old)
    fsync_folder(root / "shards")
    if plan:
        mend(root)
    return Removed(sum(gone for _, _, gone in plan), len(plan), freed)


def check_intact(path: Path, rows: Rows) -> None:
    """Refuse to write a shard anew with less than it should hold. Raises: StoreError naming a damaged segment."""
    with open(path, "rb") as shard:
        for row in rows:
            offset = int(row["offset"])
            if digest(os.pread(shard.fileno(), int(row["length"]), offset)) != bytes(row["digest"]):
                found = f"row {int(row['row'])} damaged at offset {offset} of {path.name}"
                raise StoreError("intact records beside those that are removed", found, "run store repair first")
