"""A scalar quantiser for groups of coordinates, with one float16 scale a token and group.

In: numbers float32 [T, n]. Out: codes uint8 [T, n] below 2**bits and scales float16 [T]; and back. Up to 6 bits the
levels are those of least squared error for a normal distribution (Max 1960, Lloyd 1982), which rotated or decorrelated
coordinates resemble; at 8 bits they are even steps up to the largest number. A token of zeros comes back as zeros.
"""

from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch

_STEPS_8 = 127
_ITERATIONS = 4000
_LARGEST_SCALE = 65504.0  # of float16
_SMALLEST_SCALE = 2.0**-24


@cache
def levels(bits: int) -> tuple[float, ...]:
    """The 2**bits levels for a normal distribution of variance 1, ascending, symmetric, rounded to 6 decimals."""
    normal, count = NormalDist(), 2**bits
    found = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(_ITERATIONS):
        edges = [-40.0, *((a + b) / 2 for a, b in pairwise(found)), 40.0]
        found = [
            (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low)) for low, high in pairwise(edges)
        ]
        found = [(a - b) / 2 for a, b in zip(found, reversed(found), strict=True)]
    return tuple(round(level, 6) for level in found)


@cache
def _tables(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, and the edges between them."""
    table = torch.tensor(levels(bits), dtype=torch.float32, device=device)
    return table, (table[1:] + table[:-1]) / 2


def quantise(z_TN: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [T, n] and scales float16 [T] of finite numbers [T, n]."""
    z_TN = z_TN.float()
    if bits == 8:
        scale_T = _half(z_TN.abs().amax(1) / _STEPS_8)
        steps = torch.round(z_TN / _divisor(scale_T)).clamp(-_STEPS_8, _STEPS_8)
        return (steps + _STEPS_8 + 1).to(torch.uint8), scale_T
    table, edges = _tables(bits, z_TN.device)
    first_T = _half(z_TN.square().mean(1).sqrt())
    codes = torch.bucketize(z_TN / _divisor(first_T), edges)
    chosen = table[codes]
    # The scale of least squared error for these codes.
    scale_T = _half((z_TN * chosen).sum(1) / chosen.square().sum(1))
    return codes.to(torch.uint8), torch.where(first_T == 0, first_T, scale_T)


def dequantise(codes_TN: torch.Tensor, scale_T: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers float32 [T, n] of codes and scales."""
    if bits == 8:
        return (codes_TN.float() - (_STEPS_8 + 1)) * scale_T.float()[:, None]
    table, _ = _tables(bits, codes_TN.device)
    return table[codes_TN.int()] * scale_T.float()[:, None]


def _half(scale_T: torch.Tensor) -> torch.Tensor:
    """A scale in float16: never infinite, and zero only for zeros."""
    small = torch.where(scale_T > 0, scale_T.clamp(_SMALLEST_SCALE, _LARGEST_SCALE), scale_T.new_zeros(()))
    return small.half()


def _divisor(scale_T: torch.Tensor) -> torch.Tensor:
    return torch.where(scale_T == 0, torch.ones_like(scale_T), scale_T).float()[:, None]
