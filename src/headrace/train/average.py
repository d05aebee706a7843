"""An exponential moving average of the weights, which is what gets evaluated and exported.

In: a drafter after each update. Out: averaged weights by name, in float32. The decay starts small and rises to what was
asked, so that the first weights do not linger: min(decay, (1 + t) / (10 + t)) after t updates.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Averages of a module's trained parameters; `weights` maps names to tensors on the module's device."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self.weights = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, module: nn.Module, num_updates: int) -> None:
        """Take the weights after update number `num_updates`, from 1."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        for name, parameter in module.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take up saved averages."""
        for name, own in self.weights.items():
            own.copy_(weights[name])

    @contextmanager
    def used(self, module: nn.Module) -> Iterator[None]:
        """Let the module run with its averages; its own weights come back to the bit."""
        parameters = {name: p for name, p in module.named_parameters() if name in self.weights}
        own = {name: p.detach().clone() for name, p in parameters.items()}
        _fill(parameters, self.weights)
        try:
            yield
        finally:
            _fill(parameters, own)


@torch.no_grad()
def _fill(parameters: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
