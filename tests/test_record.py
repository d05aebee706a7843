import dataclasses
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import StoreError
from headrace.record import (
    SCHEMA,
    SEGMENT_BYTES,
    Sample,
    Segment,
    digest,
    make_record,
    sample_id,
    sealed_message,
    segment_from_message,
    segment_spans,
    segment_to_message,
)
from headrace.testing.states import fake_record

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40)


def sample(tokens: list[tuple[int, bool]], row: int = 0) -> Sample:
    ids = np.array([t for t, _ in tokens], np.int32)
    mask = np.array([m for _, m in tokens], np.uint8)
    return Sample(row, sample_id(ids, mask), ids, mask)


def same(a: Segment, b: Segment) -> bool:
    return (
        (a.row, a.id, a.generation, a.segment, a.num_segments, a.token_start, a.payload)
        == (b.row, b.id, b.generation, b.segment, b.num_segments, b.token_start, b.payload)
        and np.array_equal(a.input_ids, b.input_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
    )


@settings(max_examples=60)
@given(tokens=TOKENS, row=st.integers(0, 2**62), generation=st.integers(0, 2**62), payload=st.binary(max_size=300))
def test_a_message_gives_back_its_segment(tokens, row: int, generation: int, payload: bytes) -> None:
    s = sample(tokens, row)
    segment = make_record(s, [(0, s.num_tokens)], [payload], generation).segments[0]
    message = segment_to_message(segment)
    assert same(segment_from_message(message, digest(message)), segment)
    assert same(segment_from_message(bytes(message), digest(message)), segment)


def test_a_message_is_a_stock_arrow_message() -> None:
    message = segment_to_message(make_record(sample([(1, True)]), [(0, 1)], [b"xyz"], 3).segments[0])
    table = pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)])
    assert table.column("payload").to_pylist() == [b"xyz"]
    stream = bytes(SCHEMA.serialize()) + bytes(message) + b"\xff\xff\xff\xff\0\0\0\0"
    assert pa.ipc.open_stream(stream).read_all().equals(table)


def test_a_message_that_another_writer_compressed_is_read_too() -> None:
    segment = make_record(sample([(1, True), (2, False)]), [(0, 2)], [b"states" * 500], 3).segments[0]
    batch = pa.ipc.read_record_batch(pa.py_buffer(segment_to_message(segment)), SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    message = memoryview(reader.read_next_message().serialize())
    assert len(message) < len(segment.payload)
    assert same(segment_from_message(message, digest(message)), segment)


def test_a_payload_is_a_view_of_its_message_and_ids_are_not() -> None:
    message = memoryview(
        bytearray(segment_to_message(make_record(sample([(7, True)]), [(0, 1)], [b"abc"], 0).segments[0]))
    )
    segment = segment_from_message(message, digest(message))
    message[:] = bytes(len(message))
    assert bytes(segment.payload) == b"\0\0\0"
    assert (segment.input_ids.tolist(), segment.loss_mask.tolist()) == ([7], [1])


def test_ids_and_mask_of_a_segment_have_their_own_types() -> None:
    message = segment_to_message(make_record(sample([(7, False), (8, True)]), [(0, 2)], [b""], 0).segments[0])
    segment = segment_from_message(message, digest(message))
    assert (segment.input_ids.dtype, segment.loss_mask.dtype) == (np.int32, np.uint8)


def test_every_flip_in_a_message_is_noticed_before_arrow_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    message = segment_to_message(make_record(sample([(5, True)] * 4), [(0, 4)], [b"payload!" * 4], 1).segments[0])
    expected = digest(message)
    monkeypatch.setattr(pa.ipc, "read_record_batch", lambda *_: pytest.fail("Arrow parsed damaged bytes"))
    for bit in range(0, 8 * len(message), 3):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError, match=expected.hex()):
            segment_from_message(bytes(flipped), expected)


@given(num_tokens=st.integers(0, 5000), bytes_per_token=st.floats(0, 3 * SEGMENT_BYTES))
def test_spans_cover_every_token_once_and_stay_small(num_tokens: int, bytes_per_token: float) -> None:
    spans = segment_spans(num_tokens, bytes_per_token)
    assert spans
    assert [t for a, b in spans for t in range(a, b)] == list(range(num_tokens))
    assert all((b - a) * bytes_per_token <= SEGMENT_BYTES or b - a == 1 for a, b in spans)


def test_a_token_of_the_27b_target_leaves_163_tokens_a_segment() -> None:
    assert segment_spans(400, 51_200) == [(0, 163), (163, 326), (326, 400)]


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=3))
def test_a_record_joins_what_its_spans_cut(tokens, cuts: list[int]) -> None:
    s = sample(tokens, row=7)
    edges = sorted({0, s.num_tokens, *(c for c in cuts if c < s.num_tokens)})
    spans = list(pairwise(edges)) or [(0, 0)]
    record = make_record(s, spans, [bytes(b - a) for a, b in spans], generation=2)
    assert (record.row, record.id, record.generation) == (7, s.id, 2)
    assert np.array_equal(record.input_ids, s.input_ids)
    assert np.array_equal(record.loss_mask, s.loss_mask)
    assert (record.num_tokens, record.num_bytes) == (s.num_tokens, s.num_tokens)
    assert [(k.segment, k.num_segments, k.token_start) for k in record.segments] == [
        (k, len(spans), a) for k, (a, _) in enumerate(spans)
    ]


def test_a_span_without_its_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_record(sample([(1, True)] * 4), [(0, 2), (2, 4)], [b"one"], 0)


@given(tokens=TOKENS)
def test_an_id_follows_from_content_alone(tokens) -> None:
    s = sample(tokens)
    assert len(s.id) == 16
    assert sample_id(s.input_ids.astype(np.int64), s.loss_mask.astype(bool)) == s.id  # type: ignore[arg-type]
    if tokens:
        other = s.input_ids.copy()
        other[-1] ^= 1
        assert sample_id(other, s.loss_mask) != s.id
        assert sample_id(s.input_ids, 1 - s.loss_mask) != s.id
        assert sample_id(s.input_ids[:-1], s.loss_mask[:-1]) != s.id


def test_an_id_stays_what_it_is_between_releases() -> None:
    ids, mask = np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.uint8)
    assert sample_id(ids, mask).hex() == ID_OF_123


ID_OF_123 = "81385a87a4ca009c7cb698e2155d5840"


def test_ids_and_mask_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        sample_id(np.zeros(3, np.int32), np.zeros(2, np.uint8))


def test_a_digest_runs_over_its_parts_in_order() -> None:
    assert digest(b"ab", b"c") == digest(b"abc") != digest(b"c", b"ab")
    assert len(digest()) == 16


def test_a_sample_counts_its_tokens() -> None:
    s = sample([(1, False), (2, True), (3, True)])
    assert (s.num_tokens, s.num_trained) == (3, 2)


def test_a_segment_that_was_read_is_passed_on_as_its_bytes_and_a_changed_one_is_not() -> None:
    message = bytes(segment_to_message(fake_record(3, 1).segments[0]))
    read = segment_from_message(message, digest(message))
    assert sealed_message(read) == (message, digest(message))
    changed = dataclasses.replace(read, generation=2)
    again, seal = sealed_message(changed)
    assert segment_from_message(again, seal).generation == 2
    assert bytes(again) != message
