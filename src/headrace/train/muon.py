"""Muon: momentum whose matrices are made nearly orthogonal before they move the weights.

In: gradients of matrices. Out: updates of equal spectral weight in every direction. torch.optim.Muon always iterates in
bfloat16, which is several times slower than float32 on processors without such instructions; this one takes either.
Source: arXiv 2502.16982 (the scale that matches AdamW's RMS, section 2.2), Newton-Schulz as in torch.optim.Muon.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero; singular values end between 0.7 and 1.2
ADAMW_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; for parameters [m, n]."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        """Args: dtype: of the Newton-Schulz products."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every matrix that has a gradient; closures are not used here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
                update = orthogonal(parameter.grad.lerp(buffer, MOMENTUM), self._dtype)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * ADAMW_RMS * max(parameter.shape) ** 0.5)


def orthogonal(matrix_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [m, n] with the same singular vectors and singular values near 1, by Newton-Schulz in `dtype`."""
    wide = matrix_MN.to(dtype)
    tall = wide.shape[0] > wide.shape[1]
    wide = wide.T if tall else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    # Squares of singular values need float32's range.
    long = dtype == torch.float32 and wide.shape[1] >= 2 * wide.shape[0]
    wide = _by_squares(wide) if long else _by_rows(wide)
    return (wide.T if tall else wide).to(matrix_MN.dtype)


def _by_rows(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _by_squares(wide: torch.Tensor) -> torch.Tensor:
    """The same polynomials applied to [m, m] products only, of which all are functions of the first: they commute."""
    a, b, c = COEFFICIENTS
    gram = wide @ wide.T
    whole: torch.Tensor | None = None
    for step in range(STEPS):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        whole = factor if whole is None else factor @ whole
        if step < STEPS - 1:
            gram = factor @ gram @ factor
    assert whole is not None
    return whole @ wide
