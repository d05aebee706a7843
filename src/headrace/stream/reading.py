"""One pass over positions: asked for ahead of the consumer, from one server or several, handed on in order.

In: positions, links. Out: a record or a hole for each, in the order asked, whatever was cut, damaged or restarted on
the way. Positions go to their servers in requests of about `request_bytes`, three in flight at each, always the first
that have not come: what a request did not bring goes back to those that are not asked for. What is held and asked for
stays within `read_ahead_bytes`, but the position that the consumer waits for is always asked for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import grpc

from headrace.errors import StreamError
from headrace.order import server_of
from headrace.record import Record, Segment
from headrace.source import Hole, Position
from headrace.stream.link import Link
from headrace.stream.messages import encoded
from headrace.stream.wire import MAX_POSITIONS, Ticket, Unpacking, check_item

IN_FLIGHT = 3
_MOST_PENDING = 16 * MAX_POSITIONS  # positions taken ahead, however small their records are
_FIRST_GUESS = 256 * 1024  # bytes of a record, before any has come


@dataclass
class Counts:
    """What has come, over all passes of a source."""

    records: int = 0
    wire_bytes: int = 0
    requests: int = 0
    waited_s: float = 0.0  # of the consumer, for the next record


@dataclass(order=True)
class _Slot:
    """One position on its way; `number` is its place among all of the pass."""

    number: int
    position: Position = field(compare=False)
    item: Record | Hole | None = field(default=None, compare=False)
    filled: bool = field(default=False, compare=False)  # stays when the item has been handed on
    error: BaseException | None = field(default=None, compare=False)
    num_bytes: int = field(default=0, compare=False)


@dataclass(eq=False)
class _Lane:
    """One server: its link, and a heap of positions that are not asked for."""

    link: Link
    open: list[_Slot] = field(default_factory=list)

    def put(self, slots: Sequence[_Slot]) -> None:
        """Leave slots to be asked for."""
        for slot in slots:
            heappush(self.open, slot)


class _Telling:
    """Hands a fault of a thread over, instead of printing it."""

    def __init__(self, told: Callable[[BaseException], None]) -> None:
        self._told = told

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, fault: BaseException | None, _trace: object) -> bool:
        if fault is not None:
            self._told(fault)
        return True


class Reading:
    """An iterator over the items of positions; close it to end its requests."""

    def __init__(
        self,
        positions: Iterator[Position],
        links: Sequence[Link],
        ticket: Callable[[Sequence[Position], int], Ticket],
        sizes: tuple[int, int],
        counts: Counts,
    ) -> None:
        """Args: ticket: makes the request for positions and bytes; sizes: bytes read ahead, and of one request."""
        self._positions, self._ticket, self._counts = positions, ticket, counts
        self._bound, wanted = sizes
        self._request_bytes = max(1, min(wanted, self._bound // (2 * IN_FLIGHT)))
        self._lanes = [_Lane(link) for link in links]
        self._lock = threading.Lock()
        self._came, self._askable = threading.Condition(self._lock), threading.Condition(self._lock)
        self._pending: deque[_Slot] = deque()
        self._num_slots = 0
        self._held = self._promised = 0  # bytes that have come, and that requests may bring
        self._missing = 0  # pending slots that have not come
        self._mean: float | None = None  # bytes of a record, when one has come
        self._exhausted = self._closed = False
        self._fault: BaseException | None = None  # of ours, which ended a thread
        for lane in self._lanes:
            for _ in range(IN_FLIGHT):
                # A pass that nobody closes must not keep the process from ending.
                threading.Thread(target=self._work, args=(lane,), name="headrace-ask", daemon=True).start()

    def __iter__(self) -> Iterator[Record | Hole]:
        while True:
            self._pull()
            if not self._pending:
                return
            yield self._next()

    def close(self) -> None:
        """End its requests and threads; safe to call twice."""
        with self._lock:
            self._closed = True
            self._came.notify_all()
            self._askable.notify_all()

    def _next(self) -> Record | Hole:
        slot = self._pending[0]
        began = time.monotonic()
        with self._lock:
            while slot.item is None and slot.error is None and self._fault is None and not self._closed:
                self._askable.notify_all()  # it may be asked for now, whatever is held
                self._came.wait()
            self._counts.waited_s += time.monotonic() - began
            self._pending.popleft()
            if slot.item is None:
                raise slot.error or self._fault or StreamError("a pass that is open", "it was closed", "begin another")
            self._held -= slot.num_bytes
            item, slot.item = slot.item, None  # a request that has ended may hold its slots until rubbish is collected
            if self._has_room():
                self._askable.notify_all()
        return item

    def _pull(self) -> None:
        """Take positions until what they are expected to bring fills the bound, and leave them to be asked for."""
        while not self._exhausted and (not self._pending or self._may_pull()):
            position = next(self._positions, None)
            with self._lock:
                if position is None:
                    self._exhausted = True
                    self._askable.notify_all()
                    return
                slot = _Slot(self._num_slots, position)
                self._num_slots += 1
                self._pending.append(slot)
                self._missing += 1
                lane = self._lanes[server_of(position.id, len(self._lanes))]
                lane.put([slot])
                if len(lane.open) >= self._a_request():
                    self._askable.notify_all()

    def _may_pull(self) -> bool:
        """Whether one position more than those taken would still fit."""
        ahead = self._held + (self._missing + 1) * (self._mean or _FIRST_GUESS)
        return ahead <= self._bound and len(self._pending) < _MOST_PENDING

    def _ended(self, fault: BaseException) -> None:
        """A fault of ours must not leave the consumer waiting."""
        with self._lock:
            self._fault = fault
            self._came.notify_all()

    def _work(self, lane: _Lane) -> None:
        """Ask one server for whatever comes next, until this pass ends or the server refuses for good."""
        with _Telling(self._ended):
            self._ask_all(lane)

    def _ask_all(self, lane: _Lane) -> None:
        tries = 0  # requests that failed since the last that brought something
        while (slots := self._taken(lane)) and (promised := self._admitted(slots[0])):
            if not tries:
                lane.link.note_progress()  # what it did before this request does not count
            try:
                came = self._ask(lane.link, slots, promised)
                tries = 0
            except (grpc.RpcError, StreamError) as exc:
                came = next((k for k, slot in enumerate(slots) if not slot.filled), len(slots))
                tries = 0 if came else tries + 1
                try:
                    lane.link.trouble(exc, tries)
                except StreamError as final:
                    self._fail(slots[came:], final)
                    return
            with self._lock:
                lane.put(slots[came:])
                self._askable.notify_all()

    def _taken(self, lane: _Lane) -> list[_Slot]:
        """Wait for the slots of a request; none when this is closed."""
        with self._lock:
            while not self._closed:
                most = self._a_request()
                if lane.open and (self._exhausted or len(lane.open) >= most or self._is_awaited(lane.open[0])):
                    return [heappop(lane.open) for _ in range(min(most, len(lane.open)))]
                self._askable.wait()
        return []

    def _a_request(self) -> int:
        """How many positions one asks for: the first ones, for a single record, to learn how large they are."""
        return 1 if self._mean is None else min(MAX_POSITIONS, max(1, int(self._request_bytes / self._mean)))

    def _is_awaited(self, slot: _Slot) -> bool:
        return bool(self._pending) and self._pending[0] is slot

    def _admitted(self, slot: _Slot) -> int:
        """Wait until there is room for another request, or the consumer waits for this very slot.

        Returns: bytes that it may bring, which now count as promised; 0 when this is closed.
        """
        with self._lock:
            while not self._closed:
                if self._has_room() or self._is_awaited(slot):
                    self._promised += self._to_promise()
                    return self._to_promise()
                self._askable.wait()
        return 0

    def _has_room(self) -> bool:
        """Not before it is known how large a record is: then only what is waited for is asked for."""
        return self._mean is not None and self._held + self._promised + self._to_promise() <= self._bound

    def _to_promise(self) -> int:
        return max(self._request_bytes, int(self._mean or 0))

    def _ask(self, link: Link, slots: list[_Slot], promised: int) -> int:
        """One request. Returns: how many of the slots it filled, the first of them."""
        positions = [slot.position for slot in slots]
        request = encoded({1: self._ticket(positions, self._request_bytes).encode()})
        self._counts.requests += 1
        parts: list[Segment] = []
        unpacking = Unpacking()
        came = 0
        try:
            for message in link.attempt("DoGet", request):
                self._counts.wire_bytes += len(message)
                for place, part in unpacking.parts(message):
                    if place != came or came == len(slots):
                        raise StreamError(f"place {came} of a request", str(place), "ask again")
                    item = _joined(slots[came].position, part, parts)
                    if item is not None:
                        promised -= self._fill(slots[came], item, promised)
                        came += 1
                if self._closed:
                    break
        finally:
            with self._lock:
                self._promised -= promised
                self._askable.notify_all()
        return came

    def _fill(self, slot: _Slot, item: Record | Hole, promised: int) -> int:
        """Hand an item over. Returns: how much of the promise it has used up."""
        check_item(slot.position, item)
        with self._lock:
            slot.num_bytes = sum(len(s.payload) for s in item.segments) if isinstance(item, Record) else 0
            slot.item, slot.filled = item, True
            used = min(slot.num_bytes, promised)
            self._held += slot.num_bytes
            self._promised -= used
            self._missing -= 1
            if isinstance(item, Record):
                mean = slot.num_bytes if self._mean is None else self._mean + 0.1 * (slot.num_bytes - self._mean)
                self._mean = max(mean, 1.0)
            self._counts.records += 1
            if self._is_awaited(slot):
                self._came.notify_all()
        return used

    def _fail(self, slots: list[_Slot], error: BaseException) -> None:
        with self._lock:
            for slot in slots:
                slot.error = error
            self._came.notify_all()


def _joined(position: Position, part: Segment | str, parts: list[Segment]) -> Record | Hole | None:
    """The item that a part completes; None while segments are missing. `parts` holds those of the record so far."""
    if isinstance(part, str):
        return Hole(position.row, position.id, part)
    if part.segment != len(parts) or (parts and _record_of(part) != _record_of(parts[0])):
        raise StreamError(f"segment {len(parts)} of row {position.row}", f"segment {part.segment}", "ask again")
    parts.append(part)
    if len(parts) < part.num_segments:
        return None
    record = Record(tuple(parts))
    parts.clear()
    return record


def _record_of(segment: Segment) -> tuple[int, bytes, int, int]:
    return segment.row, segment.id, segment.generation, segment.num_segments
