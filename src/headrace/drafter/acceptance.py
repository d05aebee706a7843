"""What τ is: the one definition, and its count on stored answers.

τ = generated tokens per target pass. The prefill pass and its token are left out; each later pass verifies a block and
adds the drafted tokens that stand and the target's own next one; the last block is clipped at the end marker or the
limit. So τ = 1 + accepted drafted tokens per pass, but for the clip; plain decoding has τ = 1.
In: what each pass added, or a drafter with stored samples. Out: a count that sums over samples.
Source: z-lab's decoder (DFlash, arXiv 2602.06036) counts so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.drafter.draft_vocabulary import target_logits
from headrace.drafter.model import Context, Drafter, Head
from headrace.record import Sample
from headrace.token_rule import eligible_anchors

# Samples walked in lock-step; more would make the contexts of finished ones wait longer.
_LOCK_STEP = 32


def accept_length(draft_ids: Sequence[int], truth_ids: Sequence[int]) -> int:
    """How many drafted tokens stand: the length of the common prefix with the target's own."""
    length = 0
    for drafted, true in zip(draft_ids, truth_ids, strict=False):
        if drafted != true:
            break
        length += 1
    return length


@dataclass
class AcceptanceCount:
    """What passes added: `gained[s][p]` tokens by pass p of sample s; `offered[s][p]` tokens drafted for it.

    A drafted token was accepted where the pass added more than its slot: gained > slot, or, at the clip of the last
    block, gained == slot with nothing behind it (the token stands, the target's own next one does not fit).
    """

    gained: list[list[int]] = field(default_factory=list)
    offered: list[list[int]] = field(default_factory=list)

    def add(self, gained: Sequence[int], offered: Sequence[int]) -> None:
        """Count one sample. Raises: ValueError when the two differ in length or a pass added nothing."""
        if len(gained) != len(offered) or any(g < 1 for g in gained):
            raise ValueError(f"passes do not pair: {list(gained)} and {list(offered)}")
        self.gained.append(list(gained))
        self.offered.append(list(offered))

    @property
    def num_passes(self) -> int:
        """Target passes, prefills left out."""
        return sum(len(g) for g in self.gained)

    @property
    def num_tokens(self) -> int:
        """Tokens those passes added."""
        return sum(sum(g) for g in self.gained)

    @property
    def tau(self) -> float:
        """Tokens per pass over all samples; 1 when there was no pass."""
        return self.num_tokens / self.num_passes if self.num_passes else 1.0

    def per_slot(self) -> list[float]:
        """For slot 1, 2, …: the share of passes that drafted this slot in which it was accepted.

        The last pass of a sample is left out: what its clip cut off was neither accepted nor refused.
        """
        most = max((o for offered in self.offered for o in offered), default=0)
        shares = []
        for slot in range(1, most + 1):
            pairs = [
                gained > slot
                for gains, offers in zip(self.gained, self.offered, strict=True)
                for gained, offered in zip(gains[:-1], offers[:-1], strict=True)
                if offered >= slot
            ]
            shares.append(sum(pairs) / len(pairs) if pairs else 0.0)
        return shares


@torch.inference_mode()
def teacher_forced(
    drafter: Drafter, features: Sequence[torch.Tensor], samples: Sequence[Sample], head: Head
) -> AcceptanceCount:
    """Walk stored greedy answers exactly as serving would; no target is needed.

    The first anchor is the first trained token, which prefill gives. Each block is drafted from states strictly before
    its anchor and compared with the stored answer; the next anchor is the token that the target's pass would add last.

    Args:
        features: for each sample, [T, F] (or [T, 0] for a drafter without features).
        samples: answers in one run of trained tokens; only the first run is walked.
    Returns: the count, one entry a sample, in order; a sample with fewer than two trained tokens has no pass.
    """
    count = AcceptanceCount()
    for start in range(0, len(samples), _LOCK_STEP):
        part = slice(start, start + _LOCK_STEP)
        walks = [_Walk(sample) for sample in samples[part]]
        contexts = drafter.contexts(features[part])
        while active := [i for i, walk in enumerate(walks) if not walk.ended]:
            _step(drafter, [contexts[i] for i in active], [walks[i] for i in active], head)
        for walk in walks:
            count.add(walk.gained, walk.offered)
    return count


class _Walk:
    """One stored answer, and how far it was walked."""

    def __init__(self, sample: Sample) -> None:
        eligible = eligible_anchors(sample.loss_mask)
        trained = sample.loss_mask.astype(bool)
        self.ids = sample.input_ids
        self.anchor = int(eligible[0]) if len(eligible) else 0
        untrained = np.flatnonzero(~trained[self.anchor :])
        self.end = self.anchor + int(untrained[0]) if len(untrained) else len(trained)
        self.gained: list[int] = []
        self.offered: list[int] = []
        if not len(eligible):
            self.end = self.anchor + 1

    @property
    def ended(self) -> bool:
        return self.anchor + 1 >= self.end

    def take(self, drafted: list[int]) -> None:
        room = self.end - self.anchor - 1
        accepted = accept_length(drafted[:room], self.ids[self.anchor + 1 : self.end].tolist())
        gained = min(accepted + 1, room)
        self.gained.append(gained)
        self.offered.append(min(len(drafted), room))
        self.anchor += gained


def _step(drafter: Drafter, contexts: list[Context], walks: list[_Walk], head: Head) -> None:
    device = drafter.feature_scale.device
    anchors = [torch.tensor([walk.anchor], device=device) for walk in walks]
    ids = [torch.tensor([int(walk.ids[walk.anchor])], device=device) for walk in walks]
    hidden_NBH = drafter.blocks(contexts, anchors, ids, head)
    drafted = target_logits(hidden_NBH[:, 1:], head).argmax(-1).tolist()
    for walk, tokens in zip(walks, drafted, strict=True):
        walk.take(tokens)
