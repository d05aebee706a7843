"""One global step: gradients of all its micro-batches, one update.

In: a step's samples with features and anchors, of one rank of several its share. Out: the updated drafter and the whole
step's figures, the same on every rank. Contexts are made once for all blocks of a micro-batch; the blocks run forward
and backward by groups whose gradients into the contexts add up, so memory does not grow with the number of anchors.
Every loss is divided by the supervised slots of the whole step, so how it was cut does not matter. A loss or gradient
that is not finite stops the run before the weights are touched, and names the samples.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.config import TrainConfig
from headrace.drafter.anchors import anchor_rng, supervise
from headrace.drafter.draft_vocabulary import ReducedHead
from headrace.drafter.loss import BlockLoss, Teacher, Weighting, block_loss
from headrace.drafter.model import Drafter
from headrace.drafter.vocabulary import SampledHead, sample_head
from headrace.errors import TrainError
from headrace.target.head import FrozenHead
from headrace.train.batches import Step, TrainSample
from headrace.train.optimizer import trainable
from headrace.train.ranks import ALONE, Ranks

_VOCABULARY = 1  # tells this generator from that of the anchors


@dataclass(frozen=True)
class StepFigures:
    """What one update was made of: the weighted loss, the mean cross-entropy and hit rate of supervised slots."""

    loss: float
    ce: float
    hit_rate: float
    grad_norm: float
    num_supervised: int


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch on the device: per sample features, anchors and ids; of all blocks together the supervision."""

    samples: Sequence[TrainSample]
    features: list[torch.Tensor]
    anchors: list[torch.Tensor]
    input_ids: list[torch.Tensor]
    target_ids_NB: torch.Tensor
    supervised_NB: torch.Tensor
    finals: list[torch.Tensor]

    @property
    def num_supervised(self) -> int:
        """Supervised slots."""
        return int(self.supervised_NB.sum())


def pack(samples: Sequence[TrainSample], block_size: int, device: torch.device) -> Packed:
    """Move one micro-batch to the device and line up what its blocks should predict."""
    each = [supervise(s.sample.input_ids, s.sample.loss_mask, s.anchors_A, block_size) for s in samples]
    return Packed(
        samples=samples,
        features=[s.features_TF.to(device, non_blocking=True) for s in samples],
        anchors=[torch.from_numpy(s.anchors_A).to(device) for s in samples],
        input_ids=[torch.from_numpy(s.sample.input_ids.astype(np.int64)).to(device) for s in samples],
        target_ids_NB=torch.from_numpy(np.concatenate([e.target_ids for e in each])).to(device),
        supervised_NB=torch.from_numpy(np.concatenate([e.supervised for e in each])).to(device),
        finals=[s.final_TH.to(device, non_blocking=True) for s in samples],
    )


def take_step(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    head: FrozenHead,
    step: Step,
    cfg: TrainConfig,
    ranks: Ranks = ALONE,
) -> StepFigures | None:
    """Train on one global step, at the learning rate the optimiser has; a rank with nothing to learn takes part.

    Returns: None, and changes nothing, when the step has no supervised slot (holes, or samples without anchors).
    Raises: TrainError naming the samples of a micro-batch whose loss is not finite, or of a step whose gradient is not.
    """
    device = drafter.feature_scale.device
    micro = [_labelled(pack(samples, drafter.shape.block_size, device), head) for samples in step.micro]
    num_supervised = int(ranks.sum([sum(m.num_supervised for m in micro)])[0])
    if not num_supervised:
        return None
    weighting = Weighting(cfg.loss, cfg.gamma, cfg.alpha)
    rows = _rows(head, step, micro, cfg)
    drafter.zero_grad(set_to_none=True)  # the optimiser of a rank has only its own
    loss = ce = hits = 0.0
    for batch in micro:
        for found in _learn(drafter, batch, head, rows, weighting, num_supervised, cfg):
            part = float(found.loss.detach())
            if not math.isfinite(part):
                raise _not_finite("loss", part, step, batch.samples)
            loss += part
            ce += float(found.ce_NB.sum())
            hits += float(found.hit_NB.sum())
    ranks.add_gradients(drafter.parameters())
    loss, ce, hits = ranks.sum([loss, ce, hits])
    grad_norm = float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.clip))
    if not math.isfinite(grad_norm):
        raise _not_finite("gradient", grad_norm, step, [s for samples in step.micro for s in samples])
    optimizer.step()
    ranks.hand_out(trainable(drafter))
    return StepFigures(loss, ce / num_supervised, hits / num_supervised, grad_norm, num_supervised)


def _labelled(batch: Packed, head: FrozenHead) -> Packed:
    """What slots should predict as rows of the head; of a reduced vocabulary, ids outside carry no loss."""
    if not isinstance(head, ReducedHead):
        return batch
    rows_NB, supervised_NB = head.labels(batch.target_ids_NB, batch.supervised_NB)
    return replace(batch, target_ids_NB=rows_NB, supervised_NB=supervised_NB)


def _rows(head: FrozenHead, step: Step, micro: Sequence[Packed], cfg: TrainConfig) -> FrozenHead | SampledHead:
    """The rows of the head that this step's loss looks at; a rank of several draws for its own share."""
    if cfg.sampled_vocabulary is None:
        return head
    predicted = torch.cat([m.target_ids_NB[m.supervised_NB] for m in micro] or [torch.zeros(0, dtype=torch.int64)])
    rng = anchor_rng(cfg.seed, step.epoch, step.start, step.draw, _VOCABULARY)
    return sample_head(head, predicted, cfg.sampled_vocabulary, rng)


def _learn(
    drafter: Drafter,
    batch: Packed,
    head: FrozenHead,
    rows: FrozenHead | SampledHead,
    weighting: Weighting,
    num_supervised: int,
    cfg: TrainConfig,
) -> Iterator[BlockLoss]:
    """Add one micro-batch's gradients, group by group; yields each group's loss before its backward pass.

    Args: rows: what the loss looks at of the head.
    """
    autocast = torch.autocast(drafter.feature_scale.device.type, torch.bfloat16, enabled=cfg.autocast is True)
    with autocast:
        made = drafter.contexts(batch.features)
    cut = [context.cut() for context in made]
    for group, anchors in _groups(batch.anchors, cfg.group_blocks):
        ids = [own[at] for own, at in zip(batch.input_ids, anchors, strict=True)]
        with autocast:
            hidden_NBH = drafter.blocks(cut, anchors, ids, head)
        teacher = _teacher(batch, anchors, head, cfg) if cfg.objective != "ce" else None
        found = block_loss(
            hidden_NBH, batch.target_ids_NB[group], batch.supervised_NB[group], rows, weighting, num_supervised, teacher
        )
        yield found
        found.loss.backward()  # type: ignore[no-untyped-call]
    pairs = [pair for whole, part in zip(made, cut, strict=True) for pair in whole.gradients(part)]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


def _teacher(batch: Packed, anchors: Sequence[torch.Tensor], head: FrozenHead, cfg: TrainConfig) -> Teacher:
    """The target's normed last states before each slot's token: slot k of the block at a reads that of token a + k - 1.

    Slots beyond the sample, and slot 0, are never supervised; what stands there does not matter.
    """
    assert cfg.objective != "ce"
    slots = torch.arange(batch.target_ids_NB.shape[1], device=batch.target_ids_NB.device) - 1
    rows = [
        final_TH[(at[:, None] + slots).clamp(0, len(final_TH) - 1)]
        for final_TH, at in zip(batch.finals, anchors, strict=True)
        if len(at)
    ]
    return Teacher(cfg.objective, head.normed(torch.cat(rows)))


def _groups(anchors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Cut the packed blocks of a micro-batch into groups: their places in the pack, and each sample's own anchors."""
    ends = list(itertools.accumulate(len(at) for at in anchors))
    for start in range(0, ends[-1], size):
        stop = min(start + size, ends[-1])
        own = [
            at[max(start - (end - len(at)), 0) : max(stop - (end - len(at)), 0)]
            for at, end in zip(anchors, ends, strict=True)
        ]
        yield slice(start, stop), own


def _not_finite(what: str, value: float, step: Step, samples: Sequence[TrainSample]) -> TrainError:
    names = "; ".join(s.name for s in samples)
    return TrainError(
        f"a finite {what} in epoch {step.epoch}, positions {step.start} to {step.end - 1}",
        f"{value} from {names}",
        "look at these samples; if they are sound, lower train.lr. The last checkpoint is from before this step",
    )
