"""Codecs of the ladder and states for them, shared by their tests."""

import torch

from headrace.codec.base import Codec
from headrace.codec.basis import Basis
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec, short_spec, split_groups

TAPS, HIDDEN = 3, 24
WIDTH = TAPS * HIDDEN


def states(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Taps of very different norms, one channel 300 times larger."""
    x = torch.randn(num_tokens, TAPS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    x[..., 5] *= 300
    return (x * torch.tensor([0.5, 3.0, 40.0])[:, None]).to(dtype)


def latent(rank: int = 40, bits: int = 8, escape: float | None = None, seed: int = 0) -> QuantisedCodec:
    random = torch.Generator().manual_seed(seed)
    projection = torch.linalg.qr(torch.randn(WIDTH, rank, generator=random))[0].T.contiguous()
    basis = Basis(torch.tensor([2.0, 0.3, 0.025]), torch.randn(rank, generator=random), projection, escape)
    spec = CodecSpec("latent", 0, TAPS, HIDDEN, "bfloat16", {"groups": split_groups(rank, bits, 16)})
    return QuantisedCodec(spec, basis)


def codecs() -> list[Codec]:
    plain = [open_codec(short_spec(n, TAPS, HIDDEN, "bfloat16")) for n in ("raw", "lossless", "fp8", "rotated:8")]
    return [*plain, latent()]


def named(codec: Codec) -> str:
    return codec.spec.name
