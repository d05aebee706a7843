"""AdamW for a drafter, and its moments as named tensors.

In: a module's named parameters and the train section. Out: an optimiser that decays matrices only, and a flat mapping
of tensors from which another process continues to the bit. The learning rate is set at each step, from the schedule.
"""

from collections.abc import Mapping

import torch

from headrace.config import TrainConfig
from headrace.errors import TrainError


def build_optimizer(drafter: torch.nn.Module, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on those with two axes or more."""
    trained = [p for p in drafter.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas)


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
    """Put saved moments back.

    Raises: TrainError for a tensor that belongs to no parameter of this drafter, or has another shape.
    """
    parameters = dict(drafter.named_parameters())
    for path, value in tensors.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and value.shape != parameter.shape):
            raise TrainError(
                "optimiser moments of this drafter",
                f"{path} of shape {list(value.shape)}",
                "resume with the drafter's own checkpoint",
            )
        on = torch.device("cpu") if key == "step" else parameter.device  # AdamW keeps its step count on the CPU
        optimizer.state[parameter][key] = value.to(on, copy=True)
