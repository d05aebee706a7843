"""Which records a store holds, found by row.

In: journal rows in any order. Out: whole records only, by row and, within a row, newest generation first; arrays, no
dictionary of ids, and no second copy of the rows. A record with a segment missing is not there.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.store.journal import JOURNAL_DTYPE
from headrace.store.shard import Rows

Ints = npt.NDArray[np.int64]


class RecordIndex:
    """Journal rows, the order to read them in, and where in it each record begins."""

    def __init__(self, rows: Rows) -> None:
        """Args: rows: JOURNAL_DTYPE [S], as read; the same segment may stand there twice."""
        self._segments = rows if len(rows) else np.zeros(0, JOURNAL_DTYPE)
        self._order = _order(self._segments)
        row = self._segments["row"].astype(np.int64)[self._order]
        self._starts, self._counts = _whole_records(row, self._segments, self._order)
        self._rows: Ints = row[self._starts]
        self._newest = np.ones(len(self._rows), np.bool_)
        self._newest[1:] = self._rows[1:] != self._rows[:-1]

    @property
    def rows(self) -> Ints:
        """int64 [N], ascending: the prepared set's rows that have a record."""
        return self._rows if self._newest.all() else self._rows[self._newest]

    @cached_property
    def ids(self) -> npt.NDArray[np.void]:
        """V16 [N], in the order of `rows`: ids of the newest records."""
        return np.asarray(self._segments["id"][self._order[self._starts[self._newest]]])

    @cached_property
    def generations(self) -> Ints:
        """int64 [N], in the order of `rows`: generations of the newest records."""
        return np.asarray(self._segments["generation"][self._order[self._starts[self._newest]]])

    @property
    def is_compact(self) -> bool:
        """Whether every row given is a segment of a newest record, and stands there once."""
        return int(self._counts[self._newest].sum()) == len(self._segments)

    def candidates(self, row: int) -> list[Rows]:
        """The segments of each record of a row, newest generation first; empty if there is none."""
        found, k = [], int(self._rows.searchsorted(row))
        while k < len(self._rows) and self._rows[k] == row:
            start = self._starts[k]
            found.append(self._segments[self._order[start : start + self._counts[k]]])
            k += 1
        return found

    def newest(self) -> Rows:
        """Segments of the newest record of every row, by row: what a compacted journal holds."""
        return self._segments[self._chosen()]

    def total(self, name: str) -> int:
        """Sum of a field over the segments of the newest records."""
        return int(self._segments[name][self._chosen()].sum(dtype=np.int64))

    def _chosen(self) -> Ints:
        """Places of the newest records' segments among the rows given, in order."""
        starts, counts = self._starts[self._newest], self._counts[self._newest]
        depth = np.zeros(len(self._order) + 1, np.int64)
        depth[starts] += 1
        # Records follow each other, so an end may be the next one's start; ends never repeat.
        depth[starts + counts] -= 1
        return self._order[np.cumsum(depth[:-1]) > 0]


def _order(rows: Rows) -> Ints:
    """Places of segments by row, newest generation first, then by number; each segment once."""
    row = rows["row"].astype(np.int64)  # side by side, which sorts and gathers several times as fast
    order = np.argsort(row)
    if not _repeats(row[order]).any():
        return order
    order = np.argsort(row, kind="stable")
    same_row, generation, segment = _repeats(row[order]), rows["generation"][order], rows["segment"][order]
    same_record = same_row & (generation[1:] == generation[:-1])
    if np.any(same_row & (generation[1:] > generation[:-1])) or np.any(same_record & (segment[1:] <= segment[:-1])):
        order = np.lexsort((rows["segment"], -rows["generation"], rows["row"]))
        columns = [rows[name][order] for name in ("row", "generation", "segment")]
        new = np.ones(len(order), np.bool_)
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        order = order[new]
    return order


def _repeats(row: Ints) -> npt.NDArray[np.bool_]:
    return np.equal(row[1:], row[:-1])


def _whole_records(row: Ints, rows: Rows, order: Ints) -> tuple[Ints, Ints]:
    """Start and count of each run of `order` that makes a whole record."""
    if not len(order):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not _repeats(row).any() and (rows["num_segments"] == 1).all() and not rows["segment"].any():
        return np.arange(len(order)), np.ones(len(order), np.int64)
    generation, segment, num_segments = (rows[name][order] for name in ("generation", "segment", "num_segments"))
    new = np.ones(len(order), np.bool_)
    new[1:] = (row[1:] != row[:-1]) | (generation[1:] != generation[:-1])
    starts = np.flatnonzero(new).astype(np.int64)
    counts = np.diff(np.append(starts, len(order))).astype(np.int64)
    fewest = np.minimum.reduceat(num_segments, starts)
    most = np.maximum.reduceat(num_segments, starts)
    # Segment numbers ascend without repeats, so first 0 and last K-1 in a run of K leave no gap.
    first, last = segment[starts], segment[starts + counts - 1]
    whole = (fewest == counts) & (most == counts) & (first == 0) & (last == counts - 1)
    return starts[whole], counts[whole]
