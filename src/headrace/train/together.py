"""What a run's ranks tell each other beside gradients.

In: what one rank saw of a step, and what the first rank holds. Out: the same on every rank: holes, a signal to stop, a
due save, the checkpoint to go on from. Ranks that were started with other settings, or whose weights came apart, are
told so instead of training on.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.drafter.model import Drafter
from headrace.errors import TrainError
from headrace.train.assemble import Parts
from headrace.train.batches import Step
from headrace.train.checkpoint import Checkpoint, RunState
from headrace.train.ranks import Ranks

APART = 1e-5  # relative difference of a parameter's sum between ranks; kernels may differ in the last bits


@dataclass(frozen=True)
class Told:
    """One step, as all ranks together saw it: tokens, the longest wait for data, holes by row."""

    num_tokens: int
    waited_s: float
    holes: dict[int, str] = field(default_factory=dict)


def share_step(step: Step, ranks: Ranks) -> Told:
    """Put together what every rank saw; one message of a few numbers, and one more in a step that met a hole."""
    share = ranks.share
    waits = [step.waited_s if rank == share.rank else 0.0 for rank in range(share.size)]
    num_tokens, num_holes, *waited = ranks.sum([step.num_tokens, len(step.holes), *waits])
    own = {hole.row: hole.reason for hole in step.holes}
    holes = {row: why for part in ranks.gather(own) for row, why in part.items()} if num_holes else {}
    return Told(int(num_tokens), max(waited), holes)


def agree_to_end(asked: signal.Signals | None, due: bool, ranks: Ranks) -> tuple[signal.Signals | None, bool]:
    """A signal that any rank was sent, and whether the first rank's clock says that it is time to save."""
    terminate, interrupt, save = ranks.sum(
        [float(asked is signal.SIGTERM), float(asked is signal.SIGINT), float(due and ranks.first)]
    )
    return signal.SIGTERM if terminate else signal.SIGINT if interrupt else None, bool(save)


def check_alike(identity: Mapping[str, Any], ranks: Ranks) -> None:
    """Compare what decides the run with the first rank's. Raises: TrainError naming what differs on this rank."""
    for key, wanted in ranks.decide(dict(identity)).items():
        if identity.get(key) != wanted:
            raise TrainError(
                f"{key} {wanted!r} on every rank, as on rank 0",
                f"{identity.get(key)!r} on rank {ranks.share.rank}",
                "start every rank with the same run file and flags, and give all nodes the same data",
            )


def received_checkpoint(found: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """The first rank's checkpoint, on every rank; the others need not see its folder."""
    if ranks.share.size == 1:
        return found
    state = ranks.decide(None if found is None else found.state.to_json())
    if state is None:
        return None
    weights, moments, average = (
        ranks.spread({} if found is None else own)
        for own in (({}, {}, {}) if found is None else (found.weights, found.moments, found.average))
    )
    return Checkpoint(weights, moments, RunState.from_json(state), average)


def received_drafter(parts: Parts, seed: int, ranks: Ranks, told: Callable[[str], None] | None = None) -> Drafter:
    """A new drafter, the first rank's on every rank: it alone measures the scale of the features."""
    if ranks.share.size == 1:
        return parts.new_drafter(seed, told)
    drafter = parts.new_drafter(seed, told) if ranks.first else Drafter(parts.shape, seed).to(parts.device)
    drafter.load_state_dict(ranks.spread(drafter.state_dict()))
    return drafter


@torch.no_grad()
def check_agreement(drafter: Drafter, ranks: Ranks) -> None:
    """Compare the ranks' weights by their sums of magnitudes. Raises: TrainError naming the parameter that differs."""
    if ranks.share.size == 1:
        return
    names, sums = zip(*((n, float(p.double().abs().sum())) for n, p in drafter.named_parameters()), strict=True)
    for name, own, wanted in zip(names, sums, ranks.decide(sums), strict=True):
        if not abs(own - wanted) <= APART * abs(wanted):
            raise TrainError(
                f"the same weights on every rank ({name}: sum of magnitudes {wanted!r} on rank 0)",
                f"{own!r} on rank {ranks.share.rank}",
                "give every rank the same kind of device and the same build; go on from the last checkpoint",
            )
