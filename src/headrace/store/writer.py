"""Seal encoded samples into shards.

In: records in capture order, and failures. Out: immutable shards of about `shard_bytes`, one journal row per segment
written only after its shard is durable, and `failures.jsonl`. A kill at any moment loses at most the open shard, and
of that only what is not intact. One process writes; its threads take turns. Layout: docs/formats/store-1.md.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from headrace.errors import StoreError
from headrace.record import SEGMENT_BYTES, Record
from headrace.store import failures, journal
from headrace.store.append import make_durable_folder
from headrace.store.budget import SHARD_OVERHEAD, StoreFull, record_bytes
from headrace.store.committed import Committed, Entry
from headrace.store.failures import Failure, append_failure, mend_failures, read_failures
from headrace.store.index import RecordIndex
from headrace.store.journal import append_journal, journal_rows, rewrite_journal
from headrace.store.lock import StoreLock, disk_errors
from headrace.store.manifest import FILE_NAME as MANIFEST_NAME
from headrace.store.manifest import Manifest
from headrace.store.mend import Mended, mend
from headrace.store.shard import Rows, ShardWriter, shard_name
from headrace.token_rule import TokenRule


class StoreWriter:
    """The only writer of a states folder, from construction until `close`.

    `generation` is what every record added must carry. `committed` maps each row that is durable to (id, generation).
    `failed` maps each row that failed to its last failure. `notes` says what opening had to mend or noticed.
    `num_bytes` is what shards and journal take.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        shard_bytes: int,
        shard_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int | None = None,
    ) -> None:
        """Create a store, or resume one.

        Args:
            shard_bytes: size at which a shard is sealed.
            shard_seconds: age at which a shard is sealed, looked at when a record is added and by `seal_if_old`.
            max_bytes: what shards and journal may take; None: what the disk holds.
        Raises: StoreError when another process writes, or the store is of another identity (naming the field).
        """
        self.root = root
        self.manifest = manifest
        self.notes: list[str] = []
        self._shard_bytes, self._shard_seconds, self._clock = shard_bytes, shard_seconds, clock
        self._max_bytes = max_bytes
        self._shard: ShardWriter | None = None
        self._shard_began = 0.0
        self._next_number = 0
        self._pending: dict[int, Entry] = {}
        self._broken = False
        self._turn = threading.RLock()
        with ExitStack() as stack, disk_errors(root):
            make_durable_folder(root / "shards")
            self._lock = StoreLock(root)
            stack.callback(self._lock.release)
            mended = self._take_over()
            self.failed: dict[int, Failure] = read_failures(root / failures.FILE_NAME)
            stack.pop_all()
        self.notes.extend(mended.notes)
        self.generation = mended.last_generation + 1
        index = RecordIndex(mended.rows)
        self.committed = Committed(index)
        self.num_bytes = mended.num_bytes + journal.size(len(mended.rows), len(mended.shards))
        self._rows, self._shards = [mended.rows], dict(mended.shards)
        self._superseded = not index.is_compact

    def add(self, record: Record) -> None:
        """Write a record to the open shard; seal that when it is full or old.

        Raises: StoreError for a record of another generation, of a known row with another id, already added in this
        generation, or whose segments do not follow each other; and when the disk fails. StoreFull, with nothing
        written, for a record beyond the budget.
        """
        with self._turn:
            self._check(record)
            self._check_budget(record)
            with self._guarded():
                if self._shard is None:
                    self._begin_shard()
                assert self._shard is not None
                for segment in record.segments:
                    self._shard.add(segment)
            self._superseded = self._superseded or record.row in self.committed
            self._pending[record.row] = (record.id, record.generation)
            if self._shard.num_bytes >= self._shard_bytes:
                self.seal()
            self.seal_if_old()

    def fail(self, id: bytes, row: int, reason: str, permanent: bool) -> None:
        """Note, durably, that the target could not give a sample, and why.

        Args:
            permanent: the cause will not go away: readers see a hole, and capture does not try again.
        """
        failure = Failure(row=row, id=id.hex(), reason=reason, permanent=permanent, generation=self.generation)
        with self._turn, self._guarded():
            append_failure(self.root / failures.FILE_NAME, failure)
            self.failed[row] = failure

    def forget(self, row: int) -> None:
        """Count a committed row as missing, because its record is damaged; adding it again supersedes the old one."""
        self.committed.forget(row)
        self._superseded = True

    def seal(self) -> None:
        """Make every record added so far durable and listed. Nothing happens when there is none."""
        with self._turn, self._guarded():
            if self._shard is None:
                return
            index = self._shard.seal()
            self._list(index, self._next_number)
            self.num_bytes += self._shard.num_bytes + journal.size(len(index), 1) - journal.size(0, 0)
            self._shard = None
            self._shards[self.generation, self._next_number] = len(index)
            self._rows.append(journal_rows(index, self.generation, self._next_number))
            self._next_number += 1
            self.committed.update(self._pending)
            self._pending = {}

    def seal_if_old(self) -> None:
        """Seal if the open shard has reached its age."""
        with self._turn:
            if self._shard is not None and self._clock() - self._shard_began >= self._shard_seconds:
                self.seal()

    def close(self) -> None:
        """Seal, compact the journal, give up the lock; safe to call twice, and after an error."""
        if not self._lock.held:  # also in a forked child, whose turn may never come
            return
        with self._turn:
            try:
                if not self._broken:
                    self.seal()
                    self._compact()
            finally:
                if self._shard is not None:
                    self._shard.close()
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self) -> Mended:
        """Bring the store into a state to go on from; the lock is held."""
        self._check_manifest()
        mended = mend(self.root)
        mend_failures(self.root / failures.FILE_NAME)
        return mended

    def _list(self, index: Rows, number: int) -> None:
        """Make a sealed shard count."""
        append_journal(self.root / journal.FILE_NAME, index, self.generation, number)

    def _check_manifest(self) -> None:
        if (self.root / MANIFEST_NAME).exists():
            stored = Manifest.read(self.root)
            stored.compare(self.manifest, str(self.root))
            self.notes.extend(f"provenance: {change}" for change in stored.provenance_changes(self.manifest))
        elif any((self.root / "shards").glob("*.arrow")) or (self.root / journal.FILE_NAME).exists():
            hint = "restore the manifest from a copy, or capture into another folder"
            raise StoreError(f"a manifest beside the shards in {self.root}", f"no {MANIFEST_NAME}", hint)
        else:
            self.manifest.write(self.root)

    def _begin_shard(self) -> None:
        path = self.root / "shards" / shard_name(self.generation, self._next_number)
        self._shard = ShardWriter(path, self.manifest.provenance)
        self._shard_began = self._clock()

    def _check(self, record: Record) -> None:
        row = record.row
        hint = "build records with make_record(..., generation=writer.generation), each row once"
        if record.generation != self.generation:
            raise StoreError(f"a record of generation {self.generation}", f"row {row} of {record.generation}", hint)
        known = self._pending.get(row) or self.committed.get(row)
        if known is not None and known[0] != record.id:
            raise StoreError(f"row {row} with id {known[0].hex()}", record.id.hex(), "the prepared set has changed")
        if known is not None and known[1] == self.generation:
            raise StoreError("each row once a generation", f"row {row} again in generation {known[1]}", hint)
        windowed = TokenRule.parse(self.manifest.token_rule).window is not None
        start = record.segments[0].token_start if windowed else 0
        for k, segment in enumerate(record.segments):
            numbers = (segment.row, segment.id, segment.segment, segment.num_segments, segment.token_start)
            if numbers != (row, record.id, k, len(record.segments), start):
                raise StoreError("segments that follow each other", f"segment {k} of row {row}: {numbers[2:]}", hint)
            if len(segment.payload) > SEGMENT_BYTES:
                found = f"{len(segment.payload)} in segment {k} of row {row}"
                raise StoreError(f"at most {SEGMENT_BYTES} payload bytes", found, "cut spans with segment_spans")
            start += segment.num_tokens

    def _check_budget(self, record: Record) -> None:
        if self._max_bytes is None:
            return
        opened = 0 if self._shard is None else self._shard.num_bytes + self._shard.num_index_bytes
        needed = self.num_bytes + opened + SHARD_OVERHEAD + record_bytes(record)
        if needed > self._max_bytes:
            hint = "raise it, or choose a smaller capture.codec; what is stored stays, and capture goes on from it"
            raise StoreFull(f"states within store.max_bytes {self._max_bytes:,}", f"{needed:,} bytes", hint)

    def _compact(self) -> None:
        if self._superseded:
            with self._guarded():
                rewrite_journal(self.root / journal.FILE_NAME, self._newest(), self._shards)

    def _newest(self) -> Rows:
        return RecordIndex(np.concatenate(self._rows)).newest()

    @property
    def staged_bytes(self) -> int | None:
        """Bytes that the folder holds at once while shards move on to another place; None: they stay."""
        return None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After a failed write nobody knows what reached the disk: nothing more is written until it is opened again."""
        if self._broken or not self._lock.held:
            hint = "open the store again; what is sealed is safe, and intact records of the open shard are kept"
            raise StoreError(f"an open writer of {self.root}", "it is closed, forked, or a write failed", hint)
        try:
            with disk_errors(self.root):
                yield
        except StoreError:
            self._broken = True
            raise
