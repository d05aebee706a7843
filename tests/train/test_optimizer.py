from typing import Literal

import pytest
import torch

from headrace.config import TrainConfig
from headrace.errors import TrainError
from headrace.train.optimizer import build_optimizer, moments, restore_moments, set_learning_rate


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))


def update(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


BOTH = pytest.mark.parametrize("kind", ["adamw", "muon"])


@BOTH
def test_only_matrices_decay(kind: Literal["adamw", "muon"]) -> None:
    module = small()
    optimizer = build_optimizer(module, TrainConfig(optimizer=kind, lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter, before[name] * (0.95 if parameter.ndim == 2 else 1.0)), name


@BOTH
def test_the_rate_reaches_every_group(kind: Literal["adamw", "muon"]) -> None:
    module = small()
    optimizer = build_optimizer(module, TrainConfig(optimizer=kind))
    set_learning_rate(optimizer, 0.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    update(module, optimizer, 1)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@BOTH
def test_restored_moments_go_on_to_the_bit(kind: Literal["adamw", "muon"]) -> None:
    one = small()
    first = build_optimizer(one, TrainConfig(optimizer=kind))
    update(one, first, 1)
    saved = {name: value.clone() for name, value in moments(first, one).items()}
    weights = {name: value.clone() for name, value in one.state_dict().items()}
    update(one, first, 2)

    other = small()
    second = build_optimizer(other, TrainConfig(optimizer=kind))
    other.load_state_dict(weights)
    restore_moments(second, other, saved)
    update(other, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, moments(second, other)[name]) for name, a in moments(first, one).items())


def test_muon_moves_matrices_otherwise_than_adamw_and_vectors_alike() -> None:
    moved = {}
    for kind in ("adamw", "muon"):
        module = small()
        update(module, build_optimizer(module, TrainConfig(optimizer=kind, lr=0.01)), 1)  # type: ignore[arg-type]
        moved[kind] = dict(module.named_parameters())
    for name, parameter in moved["adamw"].items():
        assert torch.equal(parameter, moved["muon"][name]) == (parameter.ndim == 1), name


def test_there_are_no_moments_before_the_first_update() -> None:
    module = small()
    assert moments(build_optimizer(module, TrainConfig()), module) == {}


@pytest.mark.parametrize("path", ["fc.weight/exp_avg", "0.weight/exp_avg"])
def test_moments_of_another_drafter_are_refused(path: str) -> None:
    module = small()
    with pytest.raises(TrainError, match=path):
        restore_moments(build_optimizer(module, TrainConfig()), module, {path: torch.zeros(2, 2)})
