"""Muon moves weights as torch.optim.Muon does, and its updates are nearly orthogonal."""

import pytest
import torch

from headrace.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert bool(((values > 0.6) & (values < 1.3)).all()), values


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_updates_are_those_of_torchs_own(shape: tuple[int, int]) -> None:
    first = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    a = Muon([ours], 0.02, 0.1, torch.bfloat16)
    b = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        for parameter, optimizer in ((ours, a), (theirs, b)):
            parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-3)
    assert not torch.allclose(ours, first, atol=1e-2)


def test_float32_and_bfloat16_agree_but_for_rounding() -> None:
    matrix = torch.randn(16, 24, generator=torch.Generator().manual_seed(2))
    exact, rounded = orthogonal(matrix, torch.float32), orthogonal(matrix, torch.bfloat16)
    assert float((exact - rounded).norm() / exact.norm()) < 0.05


def test_a_parameter_without_gradient_is_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    Muon([parameter], 0.1, 0.1, torch.float32).step()
    assert torch.equal(parameter, torch.ones(2, 3))
