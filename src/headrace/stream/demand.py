"""What readers will need, and in which order: positions asked for, and those that follow them.

In: positions that readers ask for and take. Out: keys in the order of need, and for a capture group the keys its
members will be needed under, from the order of the epoch that every reader of the run computes too. No threads, no I/O.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.config import OrderConfig
from headrace.order import capture_groups, epoch_order, group_of_rows
from headrace.source import Position
from headrace.stream.ring import STALE_S, Key

Ints = npt.NDArray[np.int64]
MOST_ASKED = 65536  # positions remembered as asked for; a hint beyond them is forgotten
_EPOCHS = 4  # orders held in memory


@dataclass(frozen=True)
class _Epoch:
    rows: Ints  # [P], the row at each place
    places: Ints  # [N], the place of each row, -1 for held-out ones
    passed: npt.NDArray[np.bool_]  # [P], places that a reader has had


class Demand:
    """Not thread-safe: its owner takes turns."""

    def __init__(
        self,
        lengths: Ints,
        eligible: npt.NDArray[np.bool_],
        order: OrderConfig,
        group_tokens: int,
        epochs: int,
        ahead: int,
        own: npt.NDArray[np.bool_] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: ahead: positions that follow what was asked for last, and are needed without being asked for.

        own: rows that are captured here; None means every one.
        """
        self._own = np.ones(len(lengths), np.bool_) if own is None else own
        self.groups = capture_groups(lengths, order.window_samples, group_tokens, own)
        self._group_of = group_of_rows(self.groups, len(lengths))
        self._eligible, self._order, self._num_epochs, self._ahead = eligible, order, epochs, ahead
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._asked: dict[Key, float] = {}
        self._asked_of: dict[int, set[Key]] = {}
        self._last: Key | None = None
        self._clock = clock

    def key(self, position: Position) -> Key:
        """How a position is held: by its place if that is the row's own in this order, else by its row alone."""
        place = int(self._epoch(position.epoch).places[position.row])
        return position.epoch, place if place == position.place else -1, position.row

    def group(self, row: int) -> int:
        """Which of `groups` captures a row."""
        return int(self._group_of[row])

    def ask(self, keys: Sequence[Key]) -> None:
        """Note that these will be needed; one that a reader has had means a rollback: so will be all that follow it."""
        now = self._clock()
        for key in keys[: max(1, MOST_ASKED - len(self._asked))]:
            self._asked[key] = now
            self._asked_of.setdefault(key[2], set()).add(key)
            if key[1] < 0:
                continue
            self._last = key
            if self.passed(key):
                self._epoch(key[0]).passed[key[1] :] = False
                for epoch, later in self._epochs.items():
                    later.passed[:] &= epoch <= key[0]

    def asked(self, key: Key) -> bool:
        """Whether this is noted as needed."""
        return key in self._asked

    def taken(self, key: Key) -> None:
        """Note that a reader has this."""
        self._forget(key)
        if key[1] >= 0:
            self._epoch(key[0]).passed[key[1]] = True

    def passed(self, key: Key) -> bool:
        """Whether a reader has had this, and nobody has gone back to it or behind it since."""
        return key[1] >= 0 and bool(self._epoch(key[0]).passed[key[1]])

    def release(self, floor: tuple[int, int]) -> None:
        """Forget what was asked for before (epoch, place)."""
        for key in [k for k in self._asked if k[:2] < floor and k[1] >= 0]:
            self._forget(key)

    def pending(self) -> Iterator[Key]:
        """Keys in the order of need: what was asked for, lowest first, then what follows the last of it."""
        stale = self._clock() - STALE_S
        for key in [k for k, asked in self._asked.items() if asked < stale]:
            self._forget(key)
        yield from sorted(self._asked)
        if self._last is None:
            return
        (epoch, place, _), left = self._last, self._ahead
        while left > 0 and epoch < self._num_epochs:
            rows = self._epoch(epoch).rows[place + 1 : place + 1 + left]
            yield from ((epoch, place + 1 + k, int(row)) for k, row in enumerate(rows) if self._own[row])
            left -= len(rows)
            epoch, place = epoch + 1, -1

    def keys_of(self, row: int, epoch: int, floor: tuple[int, int]) -> Iterable[Key]:
        """Under which keys a record of this row is needed: those asked for, and its place in this epoch's order if
        no reader has had that and it is not released."""
        asked, place = self._asked_of.get(row, set()), int(self._epoch(epoch).places[row])
        own: Key = (epoch, place, row)
        return asked | {own} if (epoch, place) >= floor and place >= 0 and not self.passed(own) else asked

    def _forget(self, key: Key) -> None:
        if self._asked.pop(key, None) is not None:
            keys = self._asked_of[key[2]]
            keys.discard(key)
            if not keys:
                del self._asked_of[key[2]]

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            rows = epoch_order(self._eligible, self._order.window_samples, self._order.seed, epoch)
            places = np.full(len(self._eligible), -1, dtype=np.int64)
            places[rows] = np.arange(len(rows))
            found = self._epochs[epoch] = _Epoch(rows, places, np.zeros(len(rows), dtype=bool))
            if len(self._epochs) > _EPOCHS:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return found
