"""Lossless gives the same bits back, and refuses what it cannot code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError
from tests.codec.ladder import HIDDEN, TAPS, states


@given(num_tokens=st.integers(0, 9), seed=st.integers(0, 50))
def test_lossless_is_bit_exact_in_both_dtypes(num_tokens: int, seed: int) -> None:
    for dtype in ("bfloat16", "float32"):
        codec = open_codec(CodecSpec("lossless", 0, TAPS, HIDDEN, dtype))
        own = states(num_tokens, seed, getattr(torch, dtype))
        found = codec.reconstruct(codec.features(codec.encode(own), num_tokens))
        assert found.dtype == own.dtype
        assert torch.equal(found, own)


def test_exponents_take_less_room_than_they_did() -> None:
    codec = open_codec(CodecSpec("lossless", 0, TAPS, HIDDEN, "bfloat16"))
    own = states(500)
    assert len(codec.encode(own)) < 0.8 * own.numel() * 2


def test_odd_bits_come_back_too() -> None:
    codec = open_codec(CodecSpec("lossless", 0, 1, 4, "bfloat16"))
    own = torch.tensor([[[0.0, -0.0, 1e-40, -3.39e38]]]).bfloat16()
    found = codec.features(codec.encode(own), 1)
    assert torch.equal(found.view(torch.int16), own.flatten(1).view(torch.int16))


def test_a_damaged_frame_is_refused() -> None:
    codec = open_codec(CodecSpec("lossless", 0, TAPS, HIDDEN, "bfloat16"))
    payload = bytearray(codec.encode(states(5)))
    payload[4 + TAPS * HIDDEN] ^= 0xFF
    with pytest.raises(CodecError, match="zstd"):
        codec.features(bytes(payload), 5)


def test_float16_is_refused() -> None:
    with pytest.raises(CodecError, match="float16"):
        open_codec(CodecSpec("lossless", 0, TAPS, HIDDEN, "float16"))
