"""Which rows a writer knows to be durable.

In: the index of a store as it was opened, and what is sealed after that. Out: a mapping of row to (id, generation)
that costs no dictionary of a million ids.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from headrace.store.index import RecordIndex

Entry = tuple[bytes, int]


class Committed(Mapping[int, Entry]):
    """Rows with a durable record."""

    def __init__(self, index: RecordIndex) -> None:
        self._rows, self._index = index.rows, index  # ids are gathered when the first one is asked for
        self._new: dict[int, Entry] = {}
        self._gone: set[int] = set()

    def update(self, entries: Mapping[int, Entry]) -> None:
        """Add rows that were sealed."""
        self._new.update(entries)
        self._gone.difference_update(entries)

    def forget(self, row: int) -> None:
        """Leave a row out; nothing happens where it is not there."""
        self._new.pop(row, None)
        self._gone.add(row)

    def __getitem__(self, row: int) -> Entry:
        if row in self._new:
            return self._new[row]
        k = self._place(row)
        if k is None or row in self._gone:
            raise KeyError(row)
        return bytes(self._index.ids[k]), int(self._index.generations[k])

    def __contains__(self, row: object) -> bool:
        if row in self._new:
            return True
        return isinstance(row, int) and row not in self._gone and self._place(row) is not None

    def __iter__(self) -> Iterator[int]:
        yield from (row for row in self._rows.tolist() if row not in self._gone and row not in self._new)
        yield from self._new

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _place(self, row: int) -> int | None:
        k = int(np.searchsorted(self._rows, row))
        return k if k < len(self._rows) and self._rows[k] == row else None
