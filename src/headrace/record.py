"""The record: one sample's ids, mask and encoded states, as the same bytes on disk, on the wire and in the trainer.

In: a sample of a prepared set and a codec's payload. Out: segments of at most 8 MiB, each one Arrow message with
a digest over every byte of it. Digests are checked before Arrow sees the bytes. Layout: docs/formats/store-1.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from headrace.errors import StoreError

SEGMENT_BYTES = 8 * 1024 * 1024
DIGEST_BYTES = 16

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
    """Segment k of a record: its token span with the payload bytes of that span."""

    row: int
    id: bytes
    generation: int
    segment: int
    num_segments: int
    token_start: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    payload: bytes

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
        return np.concatenate([s.input_ids for s in self.segments])

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [T]."""
        return np.concatenate([s.loss_mask for s in self.segments])

    @property
    def num_tokens(self) -> int:
        """T, over all segments."""
        return sum(s.num_tokens for s in self.segments)

    @property
    def num_bytes(self) -> int:
        """Payload bytes alone."""
        return sum(len(s.payload) for s in self.segments)


def segment_spans(num_tokens: int, bytes_per_token: float) -> list[tuple[int, int]]:
    """Cut a sample into token spans [start, end) whose payload stays within SEGMENT_BYTES; at least one span."""
    most = max(1, int(SEGMENT_BYTES // max(bytes_per_token, 1e-9)))
    return [(a, min(a + most, num_tokens)) for a in range(0, max(num_tokens, 1), most)]


def make_record(sample: Sample, spans: Sequence[tuple[int, int]], payloads: Sequence[bytes], generation: int) -> Record:
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


def segment_from_message(message: bytes | memoryview, expected_digest: bytes) -> Segment:
    """Check the digest of a whole message, then read the segment in it.

    Raises: StoreError naming the digests when they differ; nothing is parsed then.
    """
    found = digest(message)
    if found != expected_digest:
        raise StoreError(
            f"a message with digest {expected_digest.hex()}",
            found.hex(),
            "damaged bytes: run `headrace store repair`",
        )
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    return Segment(
        row=column["row"][0].as_py(),
        id=column["id"][0].as_py(),
        generation=column["generation"][0].as_py(),
        segment=column["segment"][0].as_py(),
        num_segments=column["num_segments"][0].as_py(),
        token_start=column["token_start"][0].as_py(),
        input_ids=column["input_ids"].flatten().to_numpy(),
        loss_mask=column["loss_mask"].flatten().to_numpy(),
        payload=column["payload"][0].as_buffer().to_pybytes(),
    )


def _one_list(values: npt.NDArray[np.generic], kind: pa.DataType) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values), kind)
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), flat)
