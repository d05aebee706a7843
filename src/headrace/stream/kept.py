"""The part of a server's states that stays on disk.

In: captured records. Out: those of the kept subset in the states folder, and any record that the folder holds, read
back. The subset is fixed by a threshold on the hash of the id, so it needs no bookkeeping. A record found damaged
counts as missing, and is written anew when it has been captured again.
"""

import threading
from pathlib import Path

from headrace.config import StoreConfig
from headrace.errors import StoreError
from headrace.order import is_kept
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Record
from headrace.source import Hole
from headrace.store.budget import StoreFull
from headrace.store.failures import holes_of
from headrace.store.manifest import Manifest
from headrace.store.reader import DamagedRecord, StoredRecord, StoreReader
from headrace.store.writer import StoreWriter


class KeptRecords:
    """A states folder that this process alone writes; thread-safe.

    `row in kept`: it can be read, as far as is known. `num_damaged` counts records found damaged.
    """

    def __init__(
        self,
        states: Path,
        manifest: Manifest,
        cfg: StoreConfig,
        share: float,
        prepared: PreparedSet,
        progress: Progress,
    ) -> None:
        """Args: share: of all samples, those to be written. Raises: StoreError as StoreWriter and StoreReader do."""
        self._prepared, self._share, self._progress, self._states = prepared, share, progress, states
        self._writer = StoreWriter(states, manifest, cfg.shard_bytes, cfg.shard_seconds, max_bytes=cfg.max_bytes)
        self._lock = threading.RLock()
        self._unsealed: set[int] = set()
        self._damaged: set[int] = set()
        self._full = False
        self.num_damaged = 0
        for note in self._writer.notes:
            progress.note(f"states: {note}")
        try:
            self._reader = StoreReader(states)
        except StoreError:
            self._writer.close()
            raise

    @property
    def generation(self) -> int:
        """What every record that is captured now carries."""
        return self._writer.generation

    @property
    def num_records(self) -> int:
        """Records that can be read."""
        return len(self._writer.committed) + len(self._unsealed)

    def holes(self) -> dict[int, Hole]:
        """Rows that failed for good, by row."""
        return holes_of(self._writer.failed, self._writer.committed.__contains__)

    def __contains__(self, row: int) -> bool:
        # Without the lock, which is held while the disk makes a shard durable.
        return row not in self._damaged and (row in self._unsealed or row in self._writer.committed)

    def wants(self, row: int) -> bool:
        """Whether a record of this row is to be written when it is captured."""
        if self._full or row in self or not is_kept(self._prepared.sample_id(row), self._share):
            return False
        # What this very process wrote and a bad disk spoiled waits for the next one: a generation writes a row once.
        return row not in self._damaged or row not in self._writer.committed

    def add(self, record: Record) -> None:
        """Write a record if it is wanted. Raises: StoreError when the disk fails."""
        with self._lock:
            if not self.wants(record.row):
                return
            try:
                self._writer.add(record)
            except StoreFull as exc:
                self._full = True
                self._progress.note(f"states: {exc.args[1]} would pass store.max_bytes; what comes is not kept")
                return
            self._unsealed.add(record.row)
            self._damaged.discard(record.row)

    def find(self, row: int, id: bytes) -> StoredRecord | None:
        """A record, not read yet; None where there is none. Raises: StoreError for a row with another id."""
        if row not in self:
            return None
        with self._lock:
            if row in self._unsealed or row not in self._reader:
                self._writer.seal()
                self._reader = StoreReader(self._states)
                self._unsealed.clear()
            return self._reader.stored(row, id)

    def fail(self, row: int, reason: str) -> Hole:
        """Declare a hole, durably: the target cannot give this sample, for a cause that stays."""
        id = self._prepared.sample_id(row)
        self._writer.fail(id, row, reason, permanent=True)
        return Hole(row, id, reason)

    def seal_if_old(self) -> None:
        """Make what was written a while ago durable."""
        self._writer.seal_if_old()

    def close(self) -> None:
        """Seal, and give the folder up; safe to call twice."""
        self._writer.close()
        self._reader.close()

    def damaged(self, row: int, error: DamagedRecord) -> None:
        """Count a record as missing: it cannot be read."""
        with self._lock:
            if row in self._damaged:
                return
            self._damaged.add(row)
            self.num_damaged += 1
            if self._writer.committed[row][1] < self._writer.generation:
                self._writer.forget(row)
        self._progress.note(f"states: row {row} is captured again: {error.args[1]}, expected {error.args[0]}")
