"""Records between capture and its readers, bounded in bytes.

In: records as they are captured, in any order, under the positions they were captured for. Out: the same records by
position, until they are released or room is needed. Nothing here ever waits: what is worth least makes room, and the
lowest position that a reader waits for is worth most, so captures that finish out of order cannot block each other.
What made room is captured again when it is asked for.
"""

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.record import Record

Key = tuple[int, int, int]  # epoch, place, row; place -1 outside the order

OWED_S = 10.0  # a reader that has not asked again for so long waits no more
STALE_S = 30.0  # what nobody has asked for in so long is worth no more than what was taken


@dataclass
class _Item:
    record: Record
    num_bytes: int
    asked: float


class RecordRing:
    """Thread-safe. Holds at most `bound_bytes`, or one record that is larger and that a reader waits for.

    From most to least worth: what a reader waits for, lowest position first; what no reader has taken, lowest first;
    what was taken, or what nobody has asked for lately, highest first (a reader that asks again wants the last ones).
    """

    def __init__(self, bound_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bound_bytes, self.num_bytes, self.num_dropped = bound_bytes, 0, 0
        self._clock = clock
        self._items: dict[Key, _Item] = {}
        self._untaken: list[Key] = []  # ascending
        self._taken: list[Key] = []  # ascending
        self._owed: dict[Key, float] = {}  # when it was last asked for
        self._aged = clock()
        self._lock = threading.Lock()

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def owe(self, key: Key) -> bool:
        """Say that a reader waits for this; it is until `take`, or until nobody has said so for OWED_S.

        Returns: whether that is news.
        """
        with self._lock:
            self._forget_owed()
            new = key not in self._owed
            self._owed[key] = self._clock()
            self._ask(key)
            return new

    def want(self, keys: Iterable[Key]) -> None:
        """Say that these will be asked for; those taken before are wanted again."""
        with self._lock:
            for key in keys:
                self._ask(key)

    def owed(self) -> list[Key]:
        """What readers wait for and is not here, ascending."""
        with self._lock:
            self._forget_owed()
            return sorted(key for key in self._owed if key not in self._items)

    def put(self, key: Key, record: Record, num_bytes: int, taken: bool = False) -> bool:
        """Offer a record; whatever is worth least makes room.

        Args: taken: a reader has had it before.
        Returns: whether it stayed.
        """
        with self._lock:
            self._forget_owed()
            if key in self._items:
                return True
            if num_bytes > self.bound_bytes and key not in self._owed:
                self.num_dropped += 1
                return False
            self._items[key] = _Item(record, num_bytes, self._clock())
            insort(self._taken if taken and key not in self._owed else self._untaken, key)
            self.num_bytes += num_bytes
            self._age()
            while self.num_bytes > self.bound_bytes and len(self._items) > 1:
                self._drop(self._worst())
                self.num_dropped += 1
            return key in self._items

    def peek(self, key: Key) -> Record | None:
        """The record, if it is here."""
        item = self._items.get(key)
        return None if item is None else item.record

    def take(self, key: Key) -> bool:
        """Say that a reader has this now: it may make room, and is still here while nothing else needs it.

        Returns: whether a reader had to wait for it.
        """
        with self._lock:
            waited = self._owed.pop(key, None) is not None
            if key in self._items and _remove(self._untaken, key):
                insort(self._taken, key)
            return waited

    def release(self, floor: tuple[int, int]) -> None:
        """Drop everything before (epoch, place), but for what a reader asked for just now and has not taken."""
        with self._lock:
            end: Key = (*floor, -1)
            recent = self._clock() - OWED_S
            before = [k for k in self._untaken[: bisect_left(self._untaken, end)] if self._items[k].asked < recent]
            for key in before + self._taken[: bisect_left(self._taken, end)]:
                self._drop(key)

    def room(self, key: Key) -> int:
        """Bytes that records from this position on may take without making room from earlier ones."""
        with self._lock:
            self._age()
            before = self._untaken[: bisect_left(self._untaken, key)]
            return self.bound_bytes - sum(self._items[k].num_bytes for k in before)

    def _ask(self, key: Key) -> None:
        item = self._items.get(key)
        if item is not None:
            item.asked = self._clock()
            if _remove(self._taken, key):
                insort(self._untaken, key)

    def _worst(self) -> Key:
        if self._taken:
            return self._taken[0]
        for key in reversed(self._untaken):
            if key not in self._owed:
                return key
        return self._untaken[-1]

    def _drop(self, key: Key) -> None:
        self.num_bytes -= self._items.pop(key).num_bytes
        if not _remove(self._untaken, key):
            _remove(self._taken, key)

    def _forget_owed(self) -> None:
        end = self._clock() - OWED_S
        for key in [k for k, asked in self._owed.items() if asked < end]:
            del self._owed[key]

    def _age(self) -> None:
        """Count what nobody asked for lately as taken; looked at once a second."""
        now = self._clock()
        if now - self._aged < 1.0:
            return
        self._aged = now
        for key in [k for k in self._untaken if self._items[k].asked < now - STALE_S and k not in self._owed]:
            _remove(self._untaken, key)
            insort(self._taken, key)


def _remove(keys: list[Key], key: Key) -> bool:
    """Take a key out of an ascending list; whether it was there."""
    k = bisect_left(keys, key)
    if k < len(keys) and keys[k] == key:
        del keys[k]
        return True
    return False
