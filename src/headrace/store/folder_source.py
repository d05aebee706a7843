"""A folder of shards as a source of records.

In: positions, in the order of an epoch. Out: a record or a hole for each, in that order, read ahead by a few threads
within a bound. Nothing is ever skipped: what is neither stored nor declared a hole is an error at its position.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.errors import StoreError
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.store.reader import StoreReader


class FolderSource:
    """Implements `headrace.source.Source` over one states folder, as sealed when it was opened."""

    def __init__(self, root: Path, read_ahead: int, num_threads: int = 2) -> None:
        """Args: read_ahead: records held ahead of the consumer, at least 1. Raises: StoreError as StoreReader does."""
        if read_ahead < 1 or num_threads < 1:
            found = f"read_ahead {read_ahead} and num_threads {num_threads}"
            raise StoreError("read_ahead and num_threads of at least 1", found, "raise train.read_ahead")
        self.reader = StoreReader(root)
        self._read_ahead = read_ahead
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headrace-read")
        self._holes = {
            row: Hole(row, bytes.fromhex(failure.id), failure.reason)
            for row, failure in self.reader.failures.items()
            if failure.permanent and row not in self.reader
        }

    def manifest(self) -> Mapping[str, Any]:
        """The content of manifest.json."""
        return self.reader.manifest.to_json()

    def records(self, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        """Yield one item for each position, in order.

        Raises: StoreError at the position of a record that is missing or damaged.
        """
        ahead: deque[Future[Record | Hole]] = deque()
        try:
            for position in positions:
                ahead.append(self._threads.submit(self._read, position))
                if len(ahead) > self._read_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def holes(self) -> Mapping[int, Hole]:
        """Rows that failed for good, by row."""
        return dict(self._holes)

    def commit(self, position: Position) -> None:
        """Nothing to do: a folder keeps everything."""

    def close(self) -> None:
        """Stop the threads and close the shards; safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def _read(self, position: Position) -> Record | Hole:
        hole = self._holes.get(position.row)
        return hole if hole is not None else self.reader.read(position.row, position.id)
