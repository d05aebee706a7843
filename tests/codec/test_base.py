"""The raw codec gives back what it took."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec.base import RawCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError

SPEC = CodecSpec("raw", 0, num_taps=3, hidden_size=8, dtype="bfloat16")


@given(num_tokens=st.integers(0, 20), seed=st.integers(0, 1000))
def test_raw_round_trip_is_bit_exact(num_tokens: int, seed: int) -> None:
    codec = open_codec(SPEC)
    states = torch.randn(num_tokens, 3, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
    payload = codec.encode(states)
    assert len(payload) == num_tokens * SPEC.bytes_per_token()
    features = codec.features(payload, num_tokens)
    assert features.shape == (num_tokens, codec.num_features)
    assert torch.equal(codec.reconstruct(features), states)


def test_features_are_token_major_taps_in_order() -> None:
    states = torch.arange(2 * 3 * 8).view(2, 3, 8).bfloat16()
    codec = open_codec(SPEC)
    assert torch.equal(codec.features(codec.encode(states), 2)[1, 8:16], states[1, 1])


def test_a_payload_that_was_read_is_viewed_and_one_that_cannot_change_is_copied() -> None:
    codec = RawCodec(CodecSpec("raw", 0, 2, 3, "float32"))
    states = torch.arange(12, dtype=torch.float32).view(2, 2, 3)
    read = memoryview(bytearray(codec.encode(states)))
    viewed, copied = codec.features(read, 2), codec.features(read.toreadonly(), 2)
    read[:4] = bytes(4 * [1])
    assert viewed[0, 0] != states[0, 0, 0]
    assert torch.equal(copied.view_as(states), states)


def test_raw_folds_to_the_same_fc() -> None:
    fc = torch.randn(4, 24)
    assert torch.equal(open_codec(SPEC).fold(fc), fc)


@pytest.mark.parametrize("states", [torch.zeros(2, 2, 8).bfloat16(), torch.zeros(2, 3, 8)])
def test_a_wrong_shape_or_dtype_is_refused(states: torch.Tensor) -> None:
    with pytest.raises(CodecError, match="bfloat16"):
        open_codec(SPEC).encode(states)


def test_a_short_payload_is_refused() -> None:
    codec = open_codec(SPEC)
    with pytest.raises(CodecError, match="96 bytes for 2 tokens"):
        codec.features(codec.encode(torch.zeros(2, 3, 8).bfloat16())[:-1], 2)


def test_an_unknown_codec_is_refused_by_name() -> None:
    spec = CodecSpec("latent", 0, 3, 8, "bfloat16")
    with pytest.raises(CodecError, match="latent"):
        open_codec(spec)
    with pytest.raises(CodecError, match="latent"):
        RawCodec(spec)
