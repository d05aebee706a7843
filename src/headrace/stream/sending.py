"""From what a supply gives to the messages of one answer, with no more in memory than the window has room for.

In: records, holes, and records that are still on disk. Out: messages. A record on disk is read segment by segment, each
when there is room for it, so a reader that takes nothing holds one segment, however large its record is. What is
damaged on disk ends the answer before it; the reader asks again, and gets it captured anew, or a hole.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from headrace.record import Record, sealed_message
from headrace.source import Hole, Position
from headrace.store.reader import DamagedRecord, StoredRecord
from headrace.stream.guard import Unavailable
from headrace.stream.supply import Item
from headrace.stream.window import Answer
from headrace.stream.wire import PIECE_BYTES, Sealed, packed_messages, plain_message

ROOM_S = 5.0  # to wait for room in the window
Damaged = Callable[[Position, DamagedRecord], None]


@dataclass(frozen=True)
class _Part:
    """A segment of the item at `place` of a ticket, not read yet; or a whole hole."""

    place: int
    segment: int
    num_bytes: int
    read: Callable[[], Sealed | str]
    on_disk: bool = False


class Sending:
    """One answer on its way; used once."""

    def __init__(self, answer: Answer, positions: Sequence[Position], damaged: Damaged, packed: bool) -> None:
        """Args: damaged: told of a record on disk that cannot be read."""
        self._answer, self._positions, self._damaged, self._packed = answer, positions, damaged, packed

    def messages(self, items: list[Item]) -> Iterator[bytes]:
        """All messages; `items` is emptied, so that each can be let go as soon as it is sent.

        Raises: Unavailable where there is no room in time, or a record is found damaged in its middle.
        """
        group: list[_Part] = []
        for part in _parts(items):
            if group and (not self._packed or sum(p.num_bytes for p in group) + part.num_bytes > PIECE_BYTES):
                if not (yield from self._send(group)):
                    return
                group = []
            group.append(part)
        if group:
            yield from self._send(group)

    def _send(self, group: list[_Part]) -> Generator[bytes, None, bool]:
        """Returns: whether all of it was intact."""
        size = sum(part.num_bytes for part in group)
        # A message is copied twice, by us and by gRPC; what is on disk is also read first.
        room = 2 * (min(size, PIECE_BYTES) if self._packed else size)
        room += sum(part.num_bytes for part in group if part.on_disk)
        if not self._answer.grow(room, ROOM_S):
            raise Unavailable("room for an answer", "too many answers on their way", "ask again")
        read: list[tuple[int, Sealed | str]] = []
        broken: _Part | None = None
        for part in group:
            try:
                read.append((part.place, part.read()))
            except DamagedRecord as exc:
                self._damaged(self._positions[part.place], exc)
                broken = part
                break
        plain = (plain_message(place, content) for place, content in read)
        for message in packed_messages(read) if self._packed else plain:
            yield message
            self._answer.sent(0)
        self._answer.sent(room)
        if broken is not None and broken.segment:
            raise Unavailable("a whole record", "a damaged one, which is made anew", "ask again")
        return broken is None


def _parts(items: list[Item]) -> Iterator[_Part]:
    items.reverse()
    place = 0
    while items:
        yield from _parts_of(place, items.pop())
        place += 1


def _parts_of(place: int, item: Item) -> Iterator[_Part]:
    match item:
        case Hole():
            reason = item.reason
            yield _Part(place, 0, 0, lambda: reason)
        case Record():
            for segment in item.segments:
                sealed = sealed_message(segment)
                yield _Part(place, segment.segment, len(sealed[0]), lambda sealed=sealed: sealed)  # type: ignore[misc]
        case StoredRecord():
            for k, length in enumerate(item.lengths):
                yield _Part(place, k, length, lambda k=k: item.message(k), on_disk=True)  # type: ignore[misc]
