"""The quantiser's error is what theory says, falls with bits, and zeros stay zeros."""

import pytest
import torch

from headrace.codec.quantise import dequantise, levels, quantise
from headrace.codec.spec import BITS


def error(z: torch.Tensor, bits: int) -> float:
    codes, scale = quantise(z, bits)
    assert int(codes.max()) < 2**bits
    return float((dequantise(codes, scale, bits) - z).square().sum() / z.square().sum())


# Mean squared error of the best quantiser of a normal distribution (Max 1960, table I).
@pytest.mark.parametrize(("bits", "expected"), [(2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)])
def test_the_error_on_normal_numbers_is_maxs(bits: int, expected: float) -> None:
    z = torch.randn(400, 512, generator=torch.Generator().manual_seed(0))
    assert error(z, bits) == pytest.approx(expected, rel=0.03)


def test_the_error_falls_with_bits() -> None:
    z = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * 7
    errors = [error(z, bits) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


@pytest.mark.parametrize("bits", BITS)
def test_zeros_tiny_and_huge_numbers_have_finite_results(bits: int) -> None:
    z = torch.stack((torch.zeros(16), torch.full((16,), 1e-12), torch.full((16,), 3e38), torch.eye(16)[3] * 300))
    codes, scale = quantise(z, bits)
    back = dequantise(codes, scale, bits)
    assert bool(torch.isfinite(back).all())
    assert not back[0].any()
    assert codes.shape == (4, 16)
    assert quantise(torch.zeros(0, 16), bits)[0].shape == (0, 16)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_levels_are_symmetric_and_ascending(bits: int) -> None:
    found = levels(bits)
    assert list(found) == sorted(found)
    assert found == tuple(-level for level in reversed(found))
