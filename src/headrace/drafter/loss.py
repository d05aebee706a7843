"""Cross-entropy of blocks against the frozen head, without a full logits tensor.

In: hidden states of blocks, what each slot should predict, and the head. Out: the weighted loss with its gradient, and
each slot's cross-entropy and hit. Loss and gradient are made together, chunk by chunk, in one forward pass: the
gradient of a softmax is known as soon as the softmax is, so nothing is kept of a chunk but [P, H] numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from headrace.drafter.model import Head
from headrace.drafter.vocabulary import SampledHead

# Positions of one product with the head; fewer would stream the head's weights through the cache too often.
CHUNK_POSITIONS = 1024
# Float32 elements worked on at a time on a CPU: about 4 MB, which stays in cache between its passes.
_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Weighting:
    """How the slots of a block are weighted.

    decay: slot k weighs exp(-(k - 1) / gamma), DFlash (arXiv 2602.06036) equation 4.
    dpace: slot j weighs sum over m >= j of the product of q up to m, with q = (1 - alpha) exp(-CE) + alpha, no gradient
    through it; D-PACE (arXiv 2605.18810) equations 7 to 9. A slot counts for what it unlocks behind it.
    """

    kind: Literal["decay", "dpace"] = "dpace"
    gamma: float = 4.0
    alpha: float = 0.5

    def weights(self, ce_NB: torch.Tensor, supervised_NB: torch.Tensor) -> torch.Tensor:
        """Float32 weights [N, B]; 0 where a slot is not supervised."""
        if self.kind == "decay":
            slots = torch.arange(ce_NB.shape[1], device=ce_NB.device, dtype=torch.float32)
            return torch.exp(-(slots - 1) / self.gamma) * supervised_NB
        confidence = (1 - self.alpha) * torch.exp(-ce_NB) + self.alpha
        reached = torch.where(supervised_NB, confidence, 1.0).cumprod(dim=1) * supervised_NB
        return reached.flip(1).cumsum(dim=1).flip(1) * supervised_NB


@dataclass(frozen=True, eq=False)
class Teacher:
    """What the target itself would say at each slot, and how the drafter is drawn to it instead of to the one token.

    `hidden_NBH`: the target's last state, after its final norm, of the token before each slot's, so that the head gives
    the distribution the slot's token was drawn from. kl: sum of p (log p - log q); tv: half the sum of abs(p - q), one
    minus the share of drafts that rejection sampling accepts (DistillSpec, arXiv 2310.08461, section 3).
    """

    kind: Literal["kl", "tv"]
    hidden_NBH: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """The loss (a scalar that carries the gradient) and, for N blocks of B slots, what it was made of.

    `ce_NB` float32, 0 where not supervised; `hit_NB` bool, the target's token has the highest logit. In bfloat16 a tie
    counts as a hit, so τ is judged by `acceptance`, not by this.
    """

    loss: torch.Tensor
    ce_NB: torch.Tensor
    hit_NB: torch.Tensor


def block_loss(
    hidden_NBH: torch.Tensor,
    target_ids_NB: torch.Tensor,
    supervised_NB: torch.Tensor,
    head: Head | SampledHead,
    weighting: Weighting,
    denominator: float,
    teacher: Teacher | None = None,
) -> BlockLoss:
    """Sum the weighted cross-entropy over supervised slots and divide by `denominator`.

    Args:
        hidden_NBH: what `Drafter.forward` gives; products are made in the head's dtype, sums in float32.
        target_ids_NB, supervised_NB: int64 and bool, as `anchors.supervise` lines them up.
        head: the whole head; or a sample of its rows, and then the cross-entropy is that of the sample.
        denominator: supervised slots of the whole global step, over all its micro-batches and ranks, so that the sum
            of the parts' losses and gradients is the step's, however it was cut.
        teacher: replaces the cross-entropy in the loss; weights still follow the cross-entropy of the tokens.
    """
    if isinstance(head, SampledHead):
        target_ids_NB = head.places[target_ids_NB]
    # An autocast region would round the float32 arithmetic of the softmax.
    with torch.autocast(hidden_NBH.device.type, enabled=False):
        results = _BlockLoss.apply(  # type: ignore[no-untyped-call]
            hidden_NBH, target_ids_NB, supervised_NB, head, weighting, denominator, teacher
        )
    return BlockLoss(*results)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NBH: torch.Tensor,
        target_ids_NB: torch.Tensor,
        supervised_NB: torch.Tensor,
        head: Head,
        weighting: Weighting,
        denominator: float,
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        grad_NBH = torch.zeros_like(hidden_NBH) if wants_grad else None
        ce_NB = torch.zeros(supervised_NB.shape, device=hidden_NBH.device)
        value_NB, weight_NB, hit_NB = torch.zeros_like(ce_NB), torch.zeros_like(ce_NB), torch.zeros_like(supervised_NB)
        logits, said = _scratch(supervised_NB, head), _scratch(supervised_NB, head) if teacher is not None else None
        for blocks in _chunks(supervised_NB):
            chosen = supervised_NB[blocks]
            hidden_PH = hidden_NBH[blocks][chosen].to(head.head_VH.dtype)
            logits_PV = torch.mm(hidden_PH, head.head_VH.T, out=logits[: len(hidden_PH)])
            ids_P1 = target_ids_NB[blocks][chosen][:, None]
            if teacher is None or said is None:
                ce_NB[blocks][chosen], hit_NB[blocks][chosen] = _softmax_gradient_(logits_PV, ids_P1, head)
                value_NB[blocks] = ce_NB[blocks]
            else:
                teacher_PH = teacher.hidden_NBH[blocks][chosen].to(head.head_VH.dtype)
                said_PV = torch.mm(teacher_PH, head.head_VH.T, out=said[: len(hidden_PH)])
                found = distribution_gradient_(logits_PV, said_PV, ids_P1, head, teacher.kind)
                value_NB[blocks][chosen], ce_NB[blocks][chosen], hit_NB[blocks][chosen] = found
            weight_NB[blocks] = weighting.weights(ce_NB[blocks], chosen)
            if grad_NBH is not None:
                weight_P1 = weight_NB[blocks][chosen][:, None] / denominator
                grad_NBH[blocks][chosen] = (torch.mm(logits_PV, head.head_VH) * weight_P1).to(grad_NBH.dtype)
        ctx.save_for_backward(grad_NBH)
        ctx.mark_non_differentiable(ce_NB, hit_NB)
        return (value_NB * weight_NB).sum() / denominator, ce_NB, hit_NB

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (grad_NBH,) = ctx.saved_tensors
        return grad_NBH * grad, None, None, None, None, None, None


def _chunks(supervised_NB: torch.Tensor) -> Iterator[slice]:
    """Cut N blocks into runs of whole blocks with about CHUNK_POSITIONS supervised slots."""
    start = filled = 0
    counts = supervised_NB.sum(1).tolist()
    for i, count in enumerate(counts):
        if filled and filled + count > CHUNK_POSITIONS:
            yield slice(start, i)
            start, filled = i, 0
        filled += count
    if filled:
        yield slice(start, len(counts))


def _scratch(supervised_NB: torch.Tensor, head: Head) -> torch.Tensor:
    """Room for the logits of the largest chunk, reused by every chunk."""
    most = max((int(supervised_NB[blocks].sum()) for blocks in _chunks(supervised_NB)), default=0)
    return head.head_VH.new_empty(most, len(head.head_VH))


def _slices(logits_PV: torch.Tensor) -> Iterator[slice]:
    """Rows worked on at a time: on a CPU as many as stay in its cache."""
    on_cpu = logits_PV.device.type == "cpu"
    rows = max(1, _SLICE_ELEMENTS // logits_PV.shape[1]) if on_cpu else max(1, len(logits_PV))
    for start in range(0, len(logits_PV), rows):
        yield slice(start, min(start + rows, len(logits_PV)))


def _softmax_gradient_(logits_PV: torch.Tensor, ids_P1: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits, in place, into the gradient of the cross-entropy with respect to them.

    Returns: cross-entropy float32 [P] and hits bool [P].
    """
    parts = list(_slices(logits_PV))
    ce_P = torch.empty(len(logits_PV), device=logits_PV.device)
    hit_P = torch.empty(len(logits_PV), dtype=torch.bool, device=logits_PV.device)
    longest = max((part.stop - part.start for part in parts), default=0)
    room = torch.empty(longest, logits_PV.shape[1], device=logits_PV.device)
    for part in parts:
        ce_P[part], hit_P[part] = _softmax_slice_(logits_PV[part], ids_P1[part], head, room)
    return ce_P, hit_P


def _softmax_slice_(
    logits_PV: torch.Tensor, ids_P1: torch.Tensor, head: Head, room: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slice of `_softmax_gradient_`; `room` is float32 scratch of at least its shape."""
    plain = head.softcap is None and head.logit_scale == 1.0
    capped = logits_PV if plain else _scale_and_cap(logits_PV, head)
    scaled = capped + head.log_weight_V if isinstance(head, SampledHead) else capped
    chosen, highest = scaled.gather(1, ids_P1), scaled.amax(1, keepdim=True)
    shares = torch.softmax(scaled, 1, dtype=torch.float32, out=room[: len(logits_PV)])
    # The largest share is at least 1/V: its logarithm is safe where the chosen token's own may be that of 0.
    ce_P1 = highest.float() - chosen.float() - shares.amax(1, keepdim=True).log()
    # Before rounding, or a confident slot's small gradient would be the difference of two rounded numbers.
    shares.scatter_add_(1, ids_P1, torch.full_like(ce_P1, -1.0))
    if head.softcap is not None:
        shares.mul_(1 - (capped / head.softcap).square())
    logits_PV.copy_(shares.mul_(head.logit_scale) if head.logit_scale != 1.0 else shares)
    return ce_P1[:, 0], (chosen >= highest)[:, 0]


def _scale_and_cap(logits_PV: torch.Tensor, head: Head) -> torch.Tensor:
    scaled = logits_PV.float() * head.logit_scale
    return scaled if head.softcap is None else torch.tanh(scaled / head.softcap) * head.softcap


def distribution_gradient_(
    logits_PV: torch.Tensor, said_PV: torch.Tensor, ids_P1: torch.Tensor, head: Head, kind: Literal["kl", "tv"]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn logits, in place, into the gradient of the distance to what the target said, with respect to them.

    Returns: distance float32 [P], cross-entropy float32 [P] and hits bool [P].
    """
    found = [_distance_slice_(logits_PV[part], said_PV[part], ids_P1[part], head, kind) for part in _slices(logits_PV)]
    distance_P, ce_P, hit_P = (torch.cat(own) for own in zip(*found, strict=True))
    return distance_P, ce_P, hit_P


def _distance_slice_(
    logits_PV: torch.Tensor, said_PV: torch.Tensor, ids_P1: torch.Tensor, head: Head, kind: Literal["kl", "tv"]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scaled = _scale_and_cap(logits_PV, head)
    log_q, log_p = torch.log_softmax(scaled, 1), torch.log_softmax(_scale_and_cap(said_PV, head), 1)
    q, p = log_q.exp(), log_p.exp()
    ce_P, hit_P = -log_q.gather(1, ids_P1)[:, 0], scaled.gather(1, ids_P1)[:, 0] >= scaled.amax(1)
    if kind == "kl":
        distance_P, gradient = (p * (log_p - log_q)).sum(1), q - p
    else:
        side = 0.5 * torch.sign(q - p)
        distance_P, gradient = ((q - p) * side).sum(1), q * (side - (q * side).sum(1, keepdim=True))
    if head.softcap is not None:
        gradient = gradient * (1 - (scaled / head.softcap).square())
    logits_PV.copy_(gradient * head.logit_scale)
    return distance_P, ce_P, hit_P
