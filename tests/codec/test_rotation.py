"""A rotation of any width keeps lengths, comes back, and spreads a spike."""

import pytest
import torch

from headrace.codec.rotation import Rotation
from headrace.errors import CodecError


@pytest.mark.parametrize("width", [1, 6, 8, 576, 2880])
def test_lengths_are_kept_and_states_come_back(width: int) -> None:
    rotation = Rotation(width, seed=3)
    x = torch.randn(4, 2, width, generator=torch.Generator().manual_seed(0))
    y = rotation.forward(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotation.inverse(y), x, rtol=1e-4, atol=1e-4)


def test_a_spike_is_spread() -> None:
    spike = torch.zeros(1, 576)
    spike[0, 7] = 300.0
    assert float(Rotation(576, 0).forward(spike).abs().max()) < 60


def test_seeds_differ_and_repeat() -> None:
    x = torch.randn(2, 24)
    assert torch.equal(Rotation(24, 1).forward(x), Rotation(24, 1).forward(x))
    assert not torch.allclose(Rotation(24, 1).forward(x), Rotation(24, 2).forward(x))


def test_an_odd_factor_too_large_is_refused() -> None:
    with pytest.raises(CodecError, match="4099"):
        Rotation(4099, 0)
