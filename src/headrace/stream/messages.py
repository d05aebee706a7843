"""The few messages of Arrow Flight that headrace speaks, as bytes.

In: fields. Out: Protocol Buffers' wire format, and back; a message whose lengths do not add up is refused before
anything of it is used. Field numbers are those of Flight.proto in Apache Arrow. Bodies are never copied on reading.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import StreamError

SERVICE = "arrow.flight.protocol.FlightService"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_DATA_HEADER, _APP_METADATA, _DATA_BODY = 2, 3, 1000
_DESCRIPTOR_COMMAND = 2
_ALIGN = 8

Bytes = bytes | memoryview


@dataclass(frozen=True)
class FlightData:
    """One message of an answer: Arrow metadata and body of a batch, with what headrace says about it."""

    header: Bytes = b""
    app_metadata: Bytes = b""
    body: Bytes = b""

    def encode(self) -> bytes:
        """As bytes, the body last."""
        return encoded({_DATA_HEADER: self.header, _APP_METADATA: self.app_metadata, _DATA_BODY: self.body})

    @staticmethod
    def packed(note: bytes, pieces: Sequence[Bytes]) -> bytes:
        """A message without Arrow metadata whose body is the pieces, one after the other.

        Spaces after the note place the body at a multiple of eight bytes, as Arrow wants its buffers; the pieces are
        copied once.
        """
        body = _varint(_DATA_BODY << 3 | _BYTES) + _varint(sum(map(len, pieces)))
        head = encoded({_APP_METADATA: note})
        missing = -(len(head) + len(body)) % _ALIGN
        while missing and (len(encoded({_APP_METADATA: note + b" " * missing})) + len(body)) % _ALIGN:
            missing += 1  # a longer note may need a longer length
        return b"".join((encoded({_APP_METADATA: note + b" " * missing}), body, *pieces))

    @classmethod
    def decode(cls, message: bytes) -> "FlightData":
        """From bytes; fields are views of the message. Raises: StreamError for damaged ones."""
        found: dict[int, memoryview] = dict(fields(message))
        return cls(*(found.get(number, b"") for number in (_DATA_HEADER, _APP_METADATA, _DATA_BODY)))


@dataclass(frozen=True)
class Action:
    """A named request with a body."""

    type: str
    body: bytes = b""

    def encode(self) -> bytes:
        """As bytes."""
        return encoded({1: self.type.encode(), 2: self.body})

    @classmethod
    def decode(cls, message: bytes) -> "Action":
        """From bytes. Raises: StreamError for damaged ones."""
        found = dict(fields(message))
        try:
            return cls(bytes(found.get(1, b"")).decode(), bytes(found.get(2, b"")))
        except UnicodeDecodeError as exc:
            raise _damaged("a name that is not text") from exc


def encoded(parts: dict[int, Bytes]) -> bytes:
    """A message of byte fields by number; empty ones are left out, as proto3 does."""
    return b"".join(piece for number, part in parts.items() if len(part) for piece in _key(number, part))


def only_bytes(message: bytes, number: int = 1) -> bytes:
    """The byte field of a message that has one (Ticket, Result, SchemaResult). Raises: StreamError."""
    return bytes(dict(fields(message)).get(number, b""))


def flight_info(schema: bytes, descriptor: bytes, num_records: int) -> bytes:
    """A FlightInfo with one endpoint, at the server that was asked; the command of the descriptor is its ticket."""
    command = only_bytes(descriptor, _DESCRIPTOR_COMMAND)
    endpoint = encoded({1: encoded({1: command})})
    told = encoded({1: schema, 2: descriptor, 3: endpoint})
    return told + bytes([4 << 3 | _VARINT]) + _varint(num_records)


def fields(message: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Byte fields of a message as (number, view), in order; numbers are skipped. Raises: StreamError."""
    view = memoryview(message)
    at, end = 0, len(view)
    while at < end:
        key, at = _read_varint(view, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, at = _read_varint(view, at)
            continue
        size = _FIXED.get(kind)
        if kind == _BYTES:
            size, at = _read_varint(view, at)
        if size is None or at + size > end:
            raise _damaged(f"field {number} of kind {kind} beyond its end")
        if kind == _BYTES:
            yield number, view[at : at + size]
        at += size


def _key(number: int, part: Bytes) -> tuple[bytes, Bytes]:
    return _varint(number << 3 | _BYTES) + _varint(len(part)), part


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(view):
            break
        byte = view[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _damaged("a number without an end")


def _damaged(found: str) -> StreamError:
    return StreamError("a message of Arrow Flight", found, "it was damaged on the way; ask again")
