"""What a server serves, whatever makes it: kept records, or records captured on demand.

In: positions that readers ask for, and what they will never ask for again. Out: for a prefix of them, in order,
records or holes, within a number of bytes. Asking again gives the same bytes until the position is released; who asks
twice loses nothing and takes nothing from others. Knows nothing of sockets. A folder of everything is the simple case.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import HeadraceError, StoreError
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.store.folder_source import FolderSource
from headrace.store.reader import DamagedRecord, StoredRecord

Item = Record | StoredRecord | Hole


class Supply(Protocol):
    """Items by position for any number of readers, asked from any number of threads.

    Positions with place -1 are of rows outside the order (held-out samples); they are asked for like any other.
    """

    @property
    def failed(self) -> HeadraceError | None:
        """What stopped it for good, if anything did; `take` raises it too."""
        ...

    def manifest(self) -> Mapping[str, Any]:
        """Identity and provenance of the states, as in manifest.json."""
        ...

    def take(self, positions: Sequence[Position], max_bytes: int, wait_s: float) -> list[Item]:
        """The items of a prefix of `positions`, in order; what it leaves will be asked for next.

        Returns: at least one item, of at most `max_bytes` together unless the first alone is larger; nothing after
        `wait_s` seconds without the first one: not yet. What is on disk is not read yet.
        Raises: StoreError for a record that can neither be read nor captured, and is no hole.
        """
        ...

    def damaged(self, position: Position, error: DamagedRecord) -> None:
        """Say that the stored record which `take` gave for this position cannot be read; `take` then gives another."""
        ...

    def holes(self) -> Mapping[int, Hole]:
        """Holes declared so far, by row."""
        ...

    def commit(self, reader: str, position: Position) -> None:
        """Say that this reader asks for nothing before `position` again; the smallest over all readers is released."""
        ...

    def figures(self) -> dict[str, float]:
        """Gauges and counters by name: produced_records, produced_bytes, ring_bytes, ring_bound, hits, misses, ..."""
        ...

    def close(self) -> None:
        """Release files and processes; safe to call twice."""
        ...


class FolderSupply:
    """Everything is kept: the records of one source, such as a states folder as sealed when it was opened."""

    failed: HeadraceError | None = None  # a folder may be mended while it is served

    def __init__(self, source: FolderSource, far: bool = False) -> None:
        """Args: far: reads take long, so what is taken is read at once, by the source's threads."""
        self._source, self._far = source, far
        self._damaged: set[int] = set()  # rows whose newest record is damaged, and an older one is not

    def manifest(self) -> Mapping[str, Any]:
        """As the source's."""
        return self._source.manifest()

    def take(self, positions: Sequence[Position], max_bytes: int, wait_s: float) -> list[Item]:
        """Find a prefix of the positions; never waits. Raises: StoreError as the source does, for the first one."""
        found: list[Item] = []
        filled = 0
        try:
            for position in positions:
                item = self._find(position)
                size = 0 if isinstance(item, Hole) else item.num_bytes
                if found and filled + size > max_bytes:
                    break
                found.append(item)
                filled += size
        except StoreError:
            if not found:  # else it is told when it comes first
                raise
        return list(self._source.records(positions[: len(found)])) if self._far and filled <= max_bytes else found

    def damaged(self, position: Position, error: DamagedRecord) -> None:
        """Take an older record from now on, or make it a hole. Raises: StoreError where too much is damaged."""
        if isinstance(self._source.read(position), Record):
            self._damaged.add(position.row)

    def _find(self, position: Position) -> Item:
        return self._source.read(position) if position.row in self._damaged else self._source.stored(position)

    def holes(self) -> Mapping[int, Hole]:
        """As the source's."""
        return self._source.holes()

    def commit(self, reader: str, position: Position) -> None:
        """Nothing to do: everything is kept."""

    def figures(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """Close the source."""
        self._source.close()
