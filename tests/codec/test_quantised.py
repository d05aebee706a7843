"""Every codec of the ladder: round trips, sizes, folds, rubbish refused; and what quantised ones do beside."""

import pytest
import torch

from headrace.codec.base import Codec
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec, short_spec
from headrace.errors import CodecError
from tests.codec.ladder import HIDDEN, TAPS, WIDTH, codecs, latent, named, states

ALL = pytest.mark.parametrize("codec", codecs(), ids=named)


@ALL
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_features_have_their_width_and_little_error(codec: Codec, num_tokens: int) -> None:
    own = states(num_tokens)
    payload = codec.encode(own)
    features = codec.features(payload, num_tokens)
    assert features.shape == (num_tokens, codec.num_features)
    assert features.dtype == torch.bfloat16
    if codec.spec.name == "latent" or not num_tokens:
        return
    back = codec.reconstruct(features).float()
    share = (back - own.float()).square().sum((0, 2)) / own.float().square().sum((0, 2))
    assert bool((share < 2e-3).all()), share


@ALL
def test_a_fold_gives_the_same_product_from_raw_taps(codec: Codec) -> None:
    own = states(30, seed=1)
    fc = torch.randn(10, codec.num_features, generator=torch.Generator().manual_seed(2))
    z = codec.coordinates(own) if isinstance(codec, QuantisedCodec) else own.float().flatten(1)
    expected = z @ fc.T
    found = own.float().flatten(1) @ codec.fold(fc).T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@ALL
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_token_and_tap(codec: Codec, bad: float) -> None:
    own = states(4)
    own[2, 1, 3] = bad
    if codec.spec.name == "raw":
        return  # the capture's own check stands before every codec; raw takes bits as they are
    with pytest.raises(CodecError, match="token 2, tap 1"):
        codec.encode(own)


@ALL
def test_a_payload_that_was_cut_is_refused(codec: Codec) -> None:
    payload = codec.encode(states(5))
    for broken in (payload[:-1], payload + b"x", b""):
        with pytest.raises(CodecError):
            codec.features(broken, 5)


@ALL
def test_zeros_come_back_as_zeros_or_the_offset(codec: Codec) -> None:
    own = torch.zeros(3, TAPS, HIDDEN, dtype=torch.bfloat16)
    features = codec.features(codec.encode(own), 3).float()
    assert float(features.abs().max()) < 0.1


@ALL
def test_expected_bytes_are_the_bytes(codec: Codec) -> None:
    num_tokens = 200
    size = len(codec.encode(states(num_tokens)))
    if codec.spec.name == "lossless":
        assert size < 0.95 * num_tokens * 2 * WIDTH
        return
    fixed = 4 if isinstance(codec, QuantisedCodec) else 0
    assert size == num_tokens * codec.spec.bytes_per_token() + fixed


def test_the_error_of_a_rotation_falls_with_bits() -> None:
    own = torch.randn(100, TAPS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = []
    for bits in (2, 3, 4, 5, 6, 8):
        codec = open_codec(short_spec(f"rotated:{bits}", TAPS, HIDDEN, "bfloat16"))
        back = codec.reconstruct(codec.features(codec.encode(own), 100))
        errors.append(float((back - own.float()).square().sum()))
    assert errors == sorted(errors, reverse=True)


def test_massive_tokens_escape_in_sixteen_bits_and_spoil_no_other() -> None:
    codec = latent(rank=WIDTH, bits=4, escape=1000.0)
    own = states(6)
    own[0] *= 200
    z = codec.coordinates(own)
    assert codec.escaped(own).tolist() == [True, False, False, False, False, False]
    payload = codec.encode(own)
    found = codec.features(payload, 6).float()
    torch.testing.assert_close(found[0], z[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(found[1:], codec.features(codec.encode(own[1:]), 5).float())
    assert len(payload) == 6 * codec.spec.bytes_per_token() + 4 + 4 + 2 * WIDTH


def test_the_offset_is_given_back() -> None:
    codec = latent(rank=8, bits=8)
    assert codec.basis is not None
    own = torch.zeros(2, TAPS, HIDDEN, dtype=torch.bfloat16)
    torch.testing.assert_close(codec.features(codec.encode(own), 2).float(), torch.zeros(2, 8), atol=0.05, rtol=0)


@pytest.mark.parametrize("text", ["rotated:7", "latent:0x4", "latent:999x4", "zip", "latent:4", ""])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(CodecError):
        short_spec(text, TAPS, HIDDEN, "bfloat16")


def test_a_basis_of_other_taps_is_refused() -> None:
    codec = latent()
    spec = CodecSpec("latent", 0, 2, HIDDEN, "bfloat16", codec.spec.parameters)
    with pytest.raises(CodecError, match="fit the codec for these taps"):
        QuantisedCodec(spec, codec.basis)
