"""What reader and server say to each other inside Flight's messages.

In: positions, records, holes. Out: tickets and answers as bytes, and back, each with a digest over all that is read
from it. A record crosses as the messages it is stored as, so that the reader holds the very bytes. Readers of headrace
ask for answers `packed` (many segments in one message); stock Flight clients get one Arrow batch a segment.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import StoreError, StreamError
from headrace.record import SCHEMA, Record, Segment, digest, segment_from_message
from headrace.source import Hole, Position
from headrace.store.buffers import ReadBuffers
from headrace.store.digested import dump_digested, load_digested
from headrace.stream.messages import Bytes, FlightData

Sealed = tuple[memoryview, bytes]  # a segment's message and its digest

MAX_POSITIONS = 256  # of one ticket
MAX_REQUEST_BYTES = 64 * 1024  # of a message that a server reads
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # of a message that a reader reads: a segment and what is said about it
PIECE_BYTES = 2 * 1024 * 1024  # small segments are put together, and large ones cut, to messages of so many bytes
_HINT = "it was damaged on the way, or is of another version of headrace"
_PREFIX = b"\xff\xff\xff\xff"  # before the length of an encapsulated message's metadata

_buffers = ReadBuffers(32 * 1024 * 1024)  # for segments that came in pieces

SCHEMA_HEADER = bytes(SCHEMA.serialize())[8:]
SCHEMA_MESSAGE = bytes(SCHEMA.serialize())


def identity_digest(manifest: Mapping[str, Any]) -> str:
    """Digest of a manifest's identity, to compare it in every request. Hexadecimal."""
    return digest(json.dumps(manifest["identity"], sort_keys=True).encode()).hex()


@dataclass(frozen=True)
class Ticket:
    """One request: the next positions of one reader, at most MAX_POSITIONS.

    `identity` is that of the states the reader began with; None asks whatever is served. `committed` is the position
    before which the reader will ask for nothing again.
    """

    positions: tuple[Position, ...]
    max_bytes: int
    identity: str | None = None
    reader: str = ""
    committed: Position | None = None
    packed: bool = False

    def encode(self) -> bytes:
        """As JSON with its digest."""
        value = {
            "positions": [_told(p) for p in self.positions],
            "max_bytes": self.max_bytes,
            "identity": self.identity,
            "reader": self.reader,
            "committed": None if self.committed is None else _told(self.committed),
            "packed": self.packed,
        }
        return dump_digested(value).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Ticket":
        """From JSON; a ticket without a digest may leave out all but `positions`, and commits nothing.

        Raises: StreamError for anything else.
        """
        value = _object(content)
        if "digest" in value:
            value = _digested(content, "a ticket")
        elif value.get("committed") is not None:
            raise _wrong("a digest on a ticket that commits", "none")
        unknown = set(value) - {"positions", "max_bytes", "identity", "reader", "committed", "packed"}
        places, most = value.get("positions"), value.get("max_bytes", MAX_ANSWER_BYTES)
        if unknown or not isinstance(places, list) or not 0 < len(places) <= MAX_POSITIONS:
            raise _wrong(f"1 to {MAX_POSITIONS} positions, and known fields", "another ticket")
        if not _is_count(most) or not isinstance(value.get("reader", ""), str):
            raise _wrong("a number of bytes and a reader's name", "another ticket")
        committed = value.get("committed")
        return cls(
            positions=tuple(map(_position, places)),
            max_bytes=max(1, most),
            identity=value.get("identity"),
            reader=value.get("reader", "")[:64],
            committed=None if committed is None else _position(committed),
            packed=bool(value.get("packed", False)),
        )


def encode_commit(reader: str, position: Position) -> bytes:
    """The body of the action `commit`."""
    return dump_digested({"reader": reader, "position": _told(position)}).encode()


def decode_commit(content: bytes) -> tuple[str, Position]:
    """Reader and position. Raises: StreamError for a damaged body."""
    value = _digested(content, "a commit")
    if not isinstance(value.get("reader"), str):
        raise _wrong("a reader's name", "none")
    return value["reader"][:64], _position(value.get("position"))


def plain_message(place: int, content: Sealed | str) -> bytes:
    """A segment as one Arrow batch, or the reason of a hole as a message without one; with its place in the ticket."""
    if isinstance(content, str):
        return FlightData(app_metadata=_note([[place, content]])).encode()
    message, seal = content
    start = 8 + int.from_bytes(message[4:8], "little")
    return FlightData(message[8:start], _note([[place, len(message), seal.hex()]]), message[start:]).encode()


def packed_messages(contents: Sequence[tuple[int, Sealed | str]]) -> Iterator[bytes]:
    """Segments as they are stored, one after the other, and holes, in order; in messages of PIECE_BYTES each."""
    notes = [
        [place, told] if isinstance(told, str) else [place, len(told[0]), told[1].hex()] for place, told in contents
    ]
    pieces = [told[0] for _, told in contents if not isinstance(told, str)]
    if sum(map(len, pieces)) <= PIECE_BYTES:
        yield FlightData.packed(_note(notes), pieces)
        return
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            yield FlightData.packed(_note(notes), [piece[start : start + PIECE_BYTES]])
            notes = []


class Unpacking:
    """The segments and holes in the packed messages of one answer; a segment may lie in several of them."""

    def __init__(self) -> None:
        self._open: tuple[int, bytes] | None = None  # place and digest of the segment that is not whole yet
        self._memory = memoryview(b"")
        self._filled = 0

    def parts(self, message: bytes) -> Iterator[tuple[int, Segment | str]]:
        """What this message completes, in order: a segment or the reason of a hole, each with its place in the ticket.

        Raises: StreamError for a damaged message, before anything of the damaged part is used.
        """
        found = FlightData.decode(message)
        if not len(found.app_metadata):
            return
        told = _digested(bytes(found.app_metadata).rstrip(), "an answer")["items"]
        body = memoryview(found.body)
        if self._open is not None:
            body = self._more(body)
            if self._filled == len(self._memory):
                (place, seal), self._open = self._open, None
                yield place, _segment(self._memory, seal)
        for place, *rest in told:
            if len(rest) == 1:
                yield place, rest[0]
                continue
            length, seal = rest[0], bytes.fromhex(rest[1])
            if length <= len(body):
                yield place, _segment(body[:length], seal)
                body = body[length:]
                continue
            if length > MAX_ANSWER_BYTES or self._open is not None:
                raise _wrong(f"a segment of at most {MAX_ANSWER_BYTES} bytes, one at a time", f"{length} bytes")
            self._open, self._filled = (place, seal), 0
            self._memory = _buffers.take(length)
            body = self._more(body)

    def _more(self, body: memoryview) -> memoryview:
        """Add to the open segment. Returns: what follows it."""
        size = min(len(body), len(self._memory) - self._filled)
        self._memory[self._filled : self._filled + size] = body[:size]
        self._filled += size
        return body[size:]


def _segment(message: memoryview, seal: bytes) -> Segment:
    try:
        return segment_from_message(message, seal)
    except StoreError as exc:
        raise _wrong("a segment as it was sent", exc.args[1]) from exc


def check_item(position: Position, item: Record | Hole) -> None:
    """Refuse an item of another sample. Raises: StreamError."""
    if (item.row, item.id) != (position.row, position.id):
        raise _wrong(f"row {position.row} (id {position.id.hex()})", f"row {item.row} (id {item.id.hex()})")


def batch_message(header: Bytes, body: Bytes) -> bytes:
    """Header and body of a plain answer as the encapsulated message whose digest the note carries."""
    return b"".join((_PREFIX, len(header).to_bytes(4, "little"), header, body))


def _note(items: list[list[Any]]) -> bytes:
    """What is said about a message: [place, length, digest] of each segment in it, [place, reason] of each hole."""
    return dump_digested({"items": items}).encode()


def _told(position: Position) -> list[Any]:
    return [position.epoch, position.place, position.row, position.id.hex()]


def _position(told: Any) -> Position:
    match told:
        case [int(epoch), int(place), int(row), str(id)] if epoch >= 0 and place >= -1 and row >= 0 and len(id) == 32:
            try:
                return Position(epoch, place, row, bytes.fromhex(id))
            except ValueError as exc:
                raise _wrong("an id of 16 bytes in hexadecimal", "another text") from exc
    raise _wrong("a position [epoch, place, row, id]", "another value")


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as exc:
        raise _wrong("a JSON object", "another text") from exc
    if not isinstance(value, dict):
        raise _wrong("a JSON object", type(value).__name__)
    return value


def _digested(content: bytes, what: str) -> dict[str, Any]:
    try:
        return load_digested(content, what, hint=_HINT)
    except (StoreError, RecursionError) as exc:
        raise _wrong(f"{what} with its digest", "a damaged one") from exc


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(expected: str, found: str) -> StreamError:
    return StreamError(expected, found, _HINT)
