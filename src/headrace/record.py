"""The record: one sample's ids, mask and encoded states, as the same bytes on disk, on the wire and in the trainer.

In: a sample of a prepared set and a codec's payload. Out: segments of at most 8 MiB, each one Arrow message with
a digest over every byte of it. Digests are checked before Arrow sees the bytes. Layout: docs/formats/store-1.md.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from headrace.errors import StoreError

SEGMENT_BYTES = 8 * 1024 * 1024
DIGEST_BYTES = 16
_NUM_BUFFERS = 23  # of SCHEMA
_INT32, _UINT8 = np.dtype("<i4"), np.dtype("u1")
_uint16, _uint32, _int32, _int64, _int32_pair, _int64_pair, _places = (
    struct.Struct(f"<{kind}").unpack_from for kind in ("H", "I", "i", "q", "2i", "2q", f"{2 * _NUM_BUFFERS}q")
)

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.binary(16), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("num_segments", pa.int32(), nullable=False),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("payload", pa.large_binary(), nullable=False),
    ],
    metadata={b"headrace": b"record-1"},
)


def digest(*parts: bytes | memoryview) -> bytes:
    """xxh3-128 over the parts in order: 16 bytes, big-endian as the xxHash library writes them."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def sample_id(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> bytes:
    """Derive a sample's id from its content alone: 16 bytes over int32 ids and uint8 mask, little-endian.

    Raises: ValueError if the two differ in length.
    """
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"ids and mask differ in length: {len(input_ids)} and {len(loss_mask)}")
    ids = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    return digest(len(input_ids).to_bytes(8, "little"), ids, np.ascontiguousarray(loss_mask, dtype="u1").tobytes())


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenised text with its loss mask, at its row in the prepared set.

    `input_ids` int32 [T]; `loss_mask` uint8 [T], 1 where the target generated the token.
    """

    row: int
    id: bytes
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    source: str = ""
    heldout: bool = False

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """Tokens that the target generated."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, eq=False)
class Segment:
    """Segment k of a record: its token span with the payload bytes of that span.

    A payload that was read is a view of the message it came in, and keeps that; a codec reads it without a copy.
    """

    row: int
    id: bytes
    generation: int
    segment: int
    num_segments: int
    token_start: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    payload: bytes | memoryview
    # The message it was read from, and its digest: what is passed on unchanged. A changed copy has none.
    sealed: tuple[memoryview, bytes] | None = field(default=None, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class Record:
    """One sample with its encoded states; segments in token order, covering every token once."""

    segments: tuple[Segment, ...] = field(repr=False)

    @property
    def row(self) -> int:
        """Row of the sample in the prepared set."""
        return self.segments[0].row

    @property
    def id(self) -> bytes:
        """Content-derived id of the sample."""
        return self.segments[0].id

    @property
    def generation(self) -> int:
        """Generation of the writer; the highest valid one wins."""
        return self.segments[0].generation

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """int32 [T]."""
        return _joined([s.input_ids for s in self.segments])

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [T]."""
        return _joined([s.loss_mask for s in self.segments])

    @property
    def num_tokens(self) -> int:
        """T, over all segments."""
        return sum(s.num_tokens for s in self.segments)

    @property
    def num_bytes(self) -> int:
        """Payload bytes alone."""
        return sum(len(s.payload) for s in self.segments)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def segment_spans(num_tokens: int, bytes_per_token: float, start: int = 0) -> list[tuple[int, int]]:
    """Cut `num_tokens` tokens from `start` on into spans [a, b) whose payload stays within SEGMENT_BYTES; at least one.

    Spans count from the sample's first token, whatever `start` is.
    """
    most = max(1, int(SEGMENT_BYTES // max(bytes_per_token, 1e-9)))
    end = start + num_tokens
    return [(a, min(a + most, end)) for a in range(start, max(end, start + 1), most)]


def make_record(
    sample: Sample, spans: Sequence[tuple[int, int]], payloads: Sequence[bytes | memoryview], generation: int
) -> Record:
    """Join a sample with the payloads of its spans (one each, same order)."""
    return Record(
        tuple(
            Segment(
                row=sample.row,
                id=sample.id,
                generation=generation,
                segment=k,
                num_segments=len(spans),
                token_start=start,
                input_ids=sample.input_ids[start:end],
                loss_mask=sample.loss_mask[start:end],
                payload=payload,
            )
            for k, ((start, end), payload) in enumerate(zip(spans, payloads, strict=True))
        )
    )


def segment_to_message(segment: Segment) -> memoryview:
    """Serialise a segment as one encapsulated Arrow IPC message (record batch of one row; metadata and body)."""
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([segment.row], pa.int64()),
            pa.array([segment.id], pa.binary(16)),
            pa.array([segment.generation], pa.int64()),
            pa.array([segment.segment], pa.int32()),
            pa.array([segment.num_segments], pa.int32()),
            pa.array([segment.token_start], pa.int64()),
            _one_list(segment.input_ids, pa.int32()),
            _one_list(segment.loss_mask, pa.uint8()),
            pa.array([segment.payload], pa.large_binary()),
        ],
        schema=SCHEMA,
    )
    return memoryview(batch.serialize())


def sealed_message(segment: Segment) -> tuple[memoryview, bytes]:
    """A segment's message and its digest: those it was read from, else new ones."""
    if segment.sealed is not None:
        return segment.sealed
    message = segment_to_message(segment)
    return message, digest(message)


def segment_from_message(message: bytes | memoryview, expected_digest: bytes) -> Segment:
    """Check the digest of a whole message, then read the segment in it.

    Returns: a segment whose payload is a view of the message; ids and mask are copies.
    Raises: StoreError naming the digests when they differ; nothing is parsed then.
    """
    found = digest(message)
    if found != expected_digest:
        raise StoreError(
            f"a message with digest {expected_digest.hex()}",
            found.hex(),
            "damaged bytes: run `headrace store repair`",
        )
    content = memoryview(message).cast("B")
    layout = _layout(content)
    if layout is None:  # another writer had compressed them
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
        content = memoryview(batch.serialize()).cast("B")
        layout = _layout(content)
        assert layout is not None
    body, at = layout
    read = Segment(
        row=_int64(content, body + at[2])[0],
        id=bytes(content[body + at[6] : body + at[6] + DIGEST_BYTES]),
        generation=_int64(content, body + at[10])[0],
        segment=_int32(content, body + at[14])[0],
        num_segments=_int32(content, body + at[18])[0],
        token_start=_int64(content, body + at[22])[0],
        input_ids=_read_list(content, body + at[26], body + at[30], _INT32),
        loss_mask=_read_list(content, body + at[34], body + at[38], _UINT8),
        payload=_read_payload(content, body + at[42], body + at[44]),
    )
    object.__setattr__(read, "sealed", (memoryview(message), expected_digest))
    return read


def _layout(message: memoryview) -> tuple[int, tuple[int, ...]] | None:
    """Where a batch's body begins, and in it place and size of each buffer; None where they are compressed.

    In the order of SCHEMA: validity and values of each column, offsets between the two for lists and the payload, and
    a validity of the lists' own values. What pyarrow's reader does in 50 us, without objects in between. Offsets are
    those of Arrow's Message.fbs.
    """
    batch = _follow(message, _field(message, _follow(message, 8), 2))
    if _field(message, batch, 3):
        return None
    return 8 + _uint32(message, 4)[0], _places(message, 4 + _follow(message, _field(message, batch, 2)))


def _field(message: memoryview, table: int, number: int) -> int:
    """Where a table of Flatbuffers has a field; 0 where it has none."""
    entries = table - _int32(message, table)[0]
    at = 4 + 2 * number
    offset: int = _uint16(message, entries + at)[0] if at < _uint16(message, entries)[0] else 0
    return table + offset if offset else 0


def _follow(message: memoryview, at: int) -> int:
    return at + int(_uint32(message, at)[0])


def _read_payload(message: memoryview, offsets: int, values: int) -> memoryview:
    start, end = _int64_pair(message, offsets)
    return message[values + start : values + end]


def _read_list(message: memoryview, offsets: int, values: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A copy: whoever keeps ids and mask does not keep the states."""
    start, end = _int32_pair(message, offsets)
    return np.frombuffer(message, dtype, end - start, values + start * dtype.itemsize).copy()


def _one_list(values: npt.NDArray[np.generic], kind: pa.DataType) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values), kind)
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), flat)
