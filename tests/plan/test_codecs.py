import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.plan.codecs import codec_size, default_codecs, framing_bytes
from headrace.record import SEGMENT_BYTES, Sample, make_record, segment_spans, segment_to_message
from headrace.store.journal import JOURNAL_DTYPE
from headrace.store.shard import INDEX_DTYPE

# Bytes of one token of Qwen3.6-27B's five taps.
SIZES = {
    "raw": 51_200,
    "lossless": 51_200 / 1.45,
    "fp8": 25_620,
    "rotated:4": 13_200,
    "rotated:2": 6_800,
    "latent:5120x8": 5_140,
    "latent:5120x4": 2_640,
    "latent:2560x8": 2_570,
    "latent:2560x4": 1_320,
    "latent:1536x6": 1_176,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_token_weighs_payload_and_scales(name: str) -> None:
    assert codec_size(name, 5, 5120).value == pytest.approx(SIZES[name])


def test_the_last_state_is_a_sixth_column() -> None:
    assert codec_size("raw", 6, 5120).value == 61_440
    assert codec_size("raw", 6, 2560).value == 30_720
    assert codec_size("raw", 5, 576, "float32").value == 11_520


@pytest.mark.parametrize("name", ["zip", "rotated:1", "rotated:9", "latent:0x4", "latent:25601x4", "latent:4", ""])
def test_a_codec_that_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(PlanError):
        codec_size(name, 5, 5120)


def test_only_what_the_codec_room_knows_is_available() -> None:
    assert codec_size("raw", 5, 5120).available
    assert codec_size("rotated:4", 5, 5120).available
    assert not codec_size("latent:2560x4", 5, 5120).available
    with pytest.raises(PlanError, match="dtype"):
        codec_size("raw", 5, 5120, "int8")


@given(st.integers(1, 8), st.sampled_from([64, 576, 5120]), st.sampled_from([2, 3, 4, 5]))
def test_more_bits_weigh_more_and_all_weigh_less_than_raw(taps: int, hidden: int, bits: int) -> None:
    sizes = [codec_size(f"rotated:{b}", taps, hidden).value for b in (bits, bits + 1)]
    assert sizes[0] < sizes[1] < codec_size("raw", taps, hidden).value


def test_the_usual_codecs_are_compared_gentlest_first() -> None:
    codecs = [codec_size(name, 5, 5120) for name in default_codecs(5120)]
    assert [c.loss for c in codecs] == sorted(c.loss for c in codecs)


@pytest.mark.parametrize("num_tokens", [1, 90, 800])
@pytest.mark.parametrize("width", [5760, 51_200])
def test_framing_is_what_the_store_writes(num_tokens: int, width: int) -> None:
    ids = np.arange(num_tokens, dtype=np.int32)
    sample = Sample(0, bytes(16), ids, np.ones(num_tokens, np.uint8))
    spans = segment_spans(num_tokens, width)
    record = make_record(sample, spans, [bytes((b - a) * width) for a, b in spans], 1)
    rows = len(spans) * (INDEX_DTYPE.itemsize + JOURNAL_DTYPE.itemsize)
    written = sum(len(segment_to_message(s)) for s in record.segments) + rows
    planned = num_tokens * width + framing_bytes(1, num_tokens, width).value
    assert planned == pytest.approx(written, rel=1e-4, abs=64)
    assert max((b - a) * width for a, b in spans) <= SEGMENT_BYTES
