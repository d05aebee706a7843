"""Put other shards in the place of some in a store of objects.

In: an address, whose only writer this is meanwhile, and a folder for two shards at a time. Out: new shards under their
own names, then one commit that names them and no longer those they replace, then the removal of these. A kill before
the commit changes nothing that counts, one after it leaves shards that the next writer removes.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.store import journal
from headrace.store.index import RecordIndex
from headrace.store.journal import index_rows, journal_rows
from headrace.store.lease import LEASE_SECONDS
from headrace.store.mend import copy_intact
from headrace.store.objects import Objects
from headrace.store.remote import SHARDS, fetch_shard, read_state, shard_sizes
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import Key, Rows, read_trailer, shard_name

_NO_LIMIT = 1 << 62
FETCHED, QUARANTINE = "fetched", "quarantine"


class Listed(NamedTuple):
    """A shard that is there: index rows of it that count, how many rows it has in all, its bytes."""

    rows: Rows
    num_rows: int
    num_bytes: int


class RemoteEditor(RemoteWriter):
    """The only writer of the store at an address until `close`, to take shards out of it.

    Opening mends as it does for any writer: `notes` says what. `before` are the journal rows from before that.
    """

    def __init__(self, address: str, staging: Path, lease_seconds: float = LEASE_SECONDS) -> None:
        """Args: staging: an empty folder. Raises: StoreError where there is no store, and as RemoteWriter does."""
        objects = Objects(address)
        try:
            state = read_state(objects)
        finally:
            objects.close()
        state.write(staging)
        self.before = journal.read_journal(staging / journal.FILE_NAME)
        self._replaced: list[Key] = []
        self._new: dict[Key, Rows] = {}
        manifest = state.stored_manifest(address)
        super().__init__(address, staging, manifest, _NO_LIMIT, _NO_LIMIT, lease_seconds=lease_seconds)
        (staging / FETCHED / SHARDS).mkdir(parents=True)

    @property
    def rows(self) -> Rows:
        """JOURNAL_DTYPE: segments that count now."""
        return np.concatenate(self._rows)

    def _size(self, num_bytes: int) -> int:
        """A shard that was cut short is looked at, not given up: some of it may be intact."""
        return _NO_LIMIT

    def listed(self) -> dict[Key, Listed]:
        """Every shard that counts now, by generation and number."""
        rows, sizes = self.rows, shard_sizes(self._objects)
        rows = rows[np.lexsort((rows["offset"], rows["shard_number"], rows["shard_generation"]))]
        pairs = np.stack([rows["shard_generation"], rows["shard_number"]], axis=1)
        keys, starts = np.unique(pairs, axis=0, return_index=True)
        parts = dict(zip(map(tuple, keys.tolist()), np.split(index_rows(rows), starts[1:]), strict=False))
        return {
            key: Listed(parts.get(key, index_rows(rows[:0])), num_rows, sizes[shard_name(*key)])
            for key, num_rows in sorted(self._shards.items())
            if num_rows
        }

    def fetch(self, key: Key, num_bytes: int) -> Path:
        """A copy of a shard in the staging folder, until the next one is fetched."""
        path = self.root / FETCHED / SHARDS / shard_name(*key)
        if not path.exists():
            for earlier in path.parent.iterdir():
                earlier.unlink()
            fetch_shard(self._objects, path.name, num_bytes, path)
        return path

    def set_aside(self, key: Key, reasons: bytes) -> None:
        """Keep a copy of a shard in `quarantine/`, made by the server, and why it is there."""
        name = shard_name(*key)
        with self._guarded():
            self._objects.copy(f"{SHARDS}/{name}", f"{QUARANTINE}/{name}")
            self._objects.replace(f"{QUARANTINE}/{name}.json", reasons)

    def take_out(self, key: Key, kept: Rows) -> Key | None:
        """Put a shard with some segments of a fetched shard in its place, from the next `commit` on.

        Args: kept: INDEX_DTYPE; for none of them nothing takes its place, and it need not be fetched.
        Returns: the new shard; None where there is none.
        """
        self._replaced.append(key)
        if not len(kept):
            return None
        new = self.generation, self._next_number
        path = self.root / SHARDS / shard_name(*new)
        with self._guarded():
            if not copy_intact(self.root / FETCHED / SHARDS / shard_name(*key), kept, path):
                return None
            self._upload(path.name)
            self._new[new] = read_trailer(path)
            path.unlink()
        self._next_number += 1
        return new

    def commit(self, for_good: bool) -> None:
        """Make all of this count at once, then remove the shards that were taken out.

        Args: for_good: a copy that a killed capture left in its folder does not bring them back.
        """
        gone = set(self._replaced)
        rows = self.rows
        shards = zip(rows["shard_generation"].tolist(), rows["shard_number"].tolist(), strict=True)
        stay = np.array([shard not in gone for shard in shards], np.bool_)
        with self._guarded():
            self._rows = [rows[stay], *(journal_rows(index, *key) for key, index in self._new.items())]
            for key in gone:
                del self._shards[key]
            self._shards |= {key: len(index) for key, index in self._new.items()}
            self._shards |= dict.fromkeys(gone, 0) if for_good else {}
            self._replace_log(self.rows)
            self._objects.remove(f"{SHARDS}/{shard_name(*key)}" for key in gone)
        self._replaced, self._new = [], {}
        self._superseded = not RecordIndex(self.rows).is_compact

    def compact(self) -> int:
        """Make one commit of everything that counts. Returns: how many became one, 0 where none did."""
        num_commits = self._log.num_since_full
        if num_commits <= 1 and not self._superseded:
            return 0
        self._replace_log(self._newest())
        self._superseded = False
        return num_commits if num_commits > 1 else 0
