"""AdamW or Muon for a drafter, and their moments as named tensors.

In: a module's named parameters and the train section. Out: an optimiser that decays matrices only, and a flat mapping
of tensors from which another process continues to the bit. The learning rate is set at each step, from the schedule.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headrace.config import TrainConfig
from headrace.errors import TrainError
from headrace.target.device import fast_bfloat16
from headrace.train.muon import Muon
from headrace.train.ranks import ALONE, Ranks


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for vectors, as one optimiser; one learning rate serves both.

    Muon's products are in bfloat16 where the parameters' device is fast in it.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], vectors: list[torch.nn.Parameter], cfg: TrainConfig) -> None:
        super().__init__([*matrices, *vectors], {"lr": cfg.peak_lr})
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            dtype = torch.bfloat16 if fast_bfloat16(matrices[0].device) else torch.float32
            self._parts.append(Muon(matrices, cfg.peak_lr, cfg.weight_decay, dtype))
        if vectors:
            self._parts.append(torch.optim.AdamW(vectors, lr=cfg.peak_lr, betas=cfg.betas, weight_decay=0.0))
        self.state = defaultdict(dict)  # one for both: no parameter is in two parts
        for part in self._parts:
            part.state = self.state
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter once; closures are not used here."""
        for part in self._parts:
            part.step()


def trainable(drafter: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that training moves, in the module's order."""
    return [p for p in drafter.parameters() if p.requires_grad]


def build_optimizer(drafter: torch.nn.Module, cfg: TrainConfig, ranks: Ranks = ALONE) -> torch.optim.Optimizer:
    """The optimiser of a run over the trainable parameters, of several ranks over those that this one owns; weight
    decay on those with two axes or more.

    Raises: TrainError for more ranks than parameters.
    """
    trained = ranks.owned(trainable(drafter))
    if not trained:
        raise TrainError("a parameter for every rank", f"none for rank {ranks.share.rank}", "start fewer ranks")
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    if cfg.optimizer == "muon":
        return MuonAndAdamW(matrices, vectors, cfg)
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.peak_lr, betas=cfg.betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use one rate in every group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moments(optimizer: torch.optim.Optimizer, drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The optimiser's state as `parameter/key` -> CPU tensor; empty before the first update."""
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer, drafter: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put saved moments back, of the parameters that this optimiser updates.

    Raises: TrainError for a tensor that belongs to no parameter of this drafter, or has another shape.
    """
    parameters = dict(drafter.named_parameters())
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and value.shape != parameter.shape):
            raise TrainError(
                "optimiser moments of this drafter",
                f"{path} of shape {list(value.shape)}",
                "resume with the drafter's own checkpoint",
            )
        if id(parameter) not in own:
            continue
        on = torch.device("cpu") if key == "step" else parameter.device  # AdamW keeps its step count on the CPU
        optimizer.state[parameter][key] = value.to(on, copy=True)
