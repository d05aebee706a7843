"""A folder of shards as a source of records.

In: positions, in the order of an epoch. Out: a record or a hole for each, in that order, read ahead by a few threads
within bounds of number and bytes, several small records a task: waking a thread takes as long as reading one. Nothing
is ever skipped: what is neither stored nor declared a hole is an error at its position. A record that turns out damaged
is declared a hole here, for this run; beyond a few of them the store itself is in doubt.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.errors import StoreError
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.store.failures import holes_of
from headrace.store.reader import DamagedRecord, StoredRecord, StoreReader

DAMAGED_SHARE = 0.01  # more damaged records than this share, and than DAMAGED_FEW, stop the run
DAMAGED_FEW = 8
_MOST_A_TASK = 8  # records
_AHEAD_BYTES = 24 * 1024 * 1024  # records that are read, but not used yet, should not leave the processor's cache


@dataclass
class _Read:
    """What a task read, and the error at which it stopped, if any."""

    read: list[Record | Hole]
    error: StoreError | None

    def items(self) -> Iterator[Record | Hole]:
        """The items in order. Raises: the error, after them."""
        yield from self.read
        if self.error is not None:
            raise self.error


class FolderSource:
    """Implements `headrace.source.Source` over one states folder, as sealed when it was opened.

    `damaged` maps rows found damaged so far to what was found.
    """

    def __init__(self, root: Path | StoreReader, read_ahead: int, num_threads: int = 2) -> None:
        """Args: root: the folder, or a reader. read_ahead: most records held ahead of the consumer, at least 1.

        Raises: StoreError as StoreReader does.
        """
        if read_ahead < 1 or num_threads < 1:
            found = f"read_ahead {read_ahead} and num_threads {num_threads}"
            raise StoreError("read_ahead and num_threads of at least 1", found, "raise train.read_ahead")
        self.reader = root if isinstance(root, StoreReader) else StoreReader(root)
        mean = self.reader.stored_bytes / max(1, self.reader.num_records)
        self._read_ahead = min(read_ahead, max(2 * num_threads, int(_AHEAD_BYTES / max(mean, 1.0))))
        self._a_task = min(_MOST_A_TASK, max(1, self._read_ahead // (2 * num_threads)))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headrace-read")
        self._changing = threading.Lock()
        self.damaged: dict[int, str] = {}
        self._holes = holes_of(self.reader.failures, self.reader.__contains__)

    def manifest(self) -> Mapping[str, Any]:
        """The content of manifest.json."""
        return self.reader.manifest.to_json()

    def records(self, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        """Yield one item for each position, in order.

        Raises: StoreError at the position of a record that is missing, or that cannot be read because the disk does
        not answer; and when more than a few records are damaged.
        """
        ahead: deque[Future[_Read]] = deque()
        following = iter(positions)
        try:
            while asked := list(islice(following, self._a_task)):
                ahead.append(self._threads.submit(self._read_all, asked))
                if len(ahead) > self._read_ahead // self._a_task:
                    yield from ahead.popleft().result().items()
            while ahead:
                yield from ahead.popleft().result().items()
        finally:
            for future in ahead:
                future.cancel()

    def holes(self) -> Mapping[int, Hole]:
        """Rows that failed for good, and rows found damaged so far, by row."""
        with self._changing:
            return dict(self._holes)

    def commit(self, position: Position) -> None:
        """Nothing to do: a folder keeps everything."""

    def close(self) -> None:
        """Stop the threads and close the shards; safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def read(self, position: Position) -> Record | Hole:
        """The item of one position, read by the caller's own thread. Raises: as `records`."""
        hole = self._holes.get(position.row)
        if hole is not None:
            return hole
        try:
            return self.reader.read(position.row, position.id)
        except DamagedRecord as exc:
            return self._declare(position, exc)

    def stored(self, position: Position) -> StoredRecord | Hole:
        """The item of one position, to be passed on; nothing is read yet. Raises: StoreError where there is none."""
        return self._holes.get(position.row) or self.reader.stored(position.row, position.id)

    def _read_all(self, positions: Sequence[Position]) -> "_Read":
        """The items of a task, up to the first one that cannot be read."""
        found = _Read([], None)
        for position in positions:
            try:
                found.read.append(self.read(position))
            except StoreError as exc:
                found.error = exc
                break
        return found

    def _declare(self, position: Position, error: DamagedRecord) -> Hole:
        """Make a damaged record a hole that stays one: later epochs do not ask the disk again."""
        hole = Hole(position.row, position.id, f"damaged: {error.args[1]}, expected {error.args[0]}")
        with self._changing:
            self._holes[position.row] = hole
            self.damaged[position.row] = f"{error.args[1]}, expected {error.args[0]}"
            if len(self.damaged) > max(DAMAGED_FEW, DAMAGED_SHARE * self.reader.num_records):
                found = f"{len(self.damaged)}, the last one row {hole.row}: {error.args[1]}"
                raise StoreError(f"at most {DAMAGED_SHARE:.0%} of the records damaged", found, error.args[2]) from error
        return hole
