"""Which records a store holds, found by row.

In: journal rows in any order. Out: whole records only, sorted by row and, within a row, newest generation first;
arrays, no dictionary of ids. A record with a segment missing is not there.
"""

import numpy as np
import numpy.typing as npt

from headrace.store.journal import JOURNAL_DTYPE
from headrace.store.shard import Rows

Ints = npt.NDArray[np.int64]


class RecordIndex:
    """Sorted journal rows, grouped into records."""

    def __init__(self, rows: Rows) -> None:
        """Args: rows: JOURNAL_DTYPE [S], as read; the same segment may stand there twice."""
        if len(rows) == 0:
            rows = np.zeros(0, JOURNAL_DTYPE)
        rows = rows[np.lexsort((rows["segment"], -rows["generation"], rows["row"]))]
        again = np.zeros(len(rows), np.bool_)
        if len(rows):
            again[1:] = (
                (rows["row"][1:] == rows["row"][:-1])
                & (rows["generation"][1:] == rows["generation"][:-1])
                & (rows["segment"][1:] == rows["segment"][:-1])
            )
        self._segments = rows[~again]
        self._starts, self._counts = _whole_records(self._segments)
        self._rows: Ints = self._segments["row"][self._starts].astype(np.int64)
        self._newest = np.ones(len(self._rows), np.bool_)
        self._newest[1:] = self._rows[1:] != self._rows[:-1]

    @property
    def rows(self) -> Ints:
        """int64 [N], ascending: the prepared set's rows that have a record."""
        return self._rows[self._newest]

    @property
    def ids(self) -> npt.NDArray[np.void]:
        """V16 [N], in the order of `rows`: ids of the newest records."""
        return np.asarray(self._segments["id"][self._starts[self._newest]])

    @property
    def generations(self) -> Ints:
        """int64 [N], in the order of `rows`: generations of the newest records."""
        return np.asarray(self._segments["generation"][self._starts[self._newest]])

    def candidates(self, row: int) -> list[Rows]:
        """The segments of each record of a row, newest generation first; empty if there is none."""
        low, high = np.searchsorted(self._rows, [row, row + 1])
        return [self._segments[self._starts[k] : self._starts[k] + self._counts[k]] for k in range(low, high)]

    def newest(self) -> Rows:
        """Segments of the newest record of every row: what a compacted journal holds."""
        starts, counts = self._starts[self._newest], self._counts[self._newest]
        depth = np.zeros(len(self._segments) + 1, np.int64)
        depth[starts] += 1
        depth[starts + counts] -= 1
        return self._segments[np.cumsum(depth[:-1]) > 0]


def _whole_records(segments: Rows) -> tuple[Ints, Ints]:
    """Start and count of each run of segments that makes a whole record; `segments` sorted, no repeats."""
    if not len(segments):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    new = np.ones(len(segments), np.bool_)
    new[1:] = (segments["row"][1:] != segments["row"][:-1]) | (
        segments["generation"][1:] != segments["generation"][:-1]
    )
    starts = np.flatnonzero(new).astype(np.int64)
    counts = np.diff(np.append(starts, len(segments))).astype(np.int64)
    fewest = np.minimum.reduceat(segments["num_segments"], starts)
    most = np.maximum.reduceat(segments["num_segments"], starts)
    # Segment numbers ascend without repeats, so first 0 and last K-1 in a run of K leave no gap.
    first, last = segments["segment"][starts], segments["segment"][starts + counts - 1]
    whole = (fewest == counts) & (most == counts) & (first == 0) & (last == counts - 1)
    return starts[whole], counts[whole]
