"""τ on held-out samples while training.

In: a fixed, evenly spaced choice of held-out rows, read and decoded once. Out: teacher-forced τ: each stored answer is
walked exactly as serving would, with the states that capture stored, so no target is needed. Definition:
drafter/acceptance.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from headrace.drafter.acceptance import AcceptanceCount, teacher_forced
from headrace.drafter.model import Drafter, Head
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample
from headrace.source import Hole, Position
from headrace.token_rule import eligible_anchors
from headrace.train.batches import Reader
from headrace.train.ranks import ALONE, WHOLE, Ranks, Share


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out samples with their features [T, F]."""

    samples: list[Sample]
    features: list[torch.Tensor]

    @classmethod
    def read(cls, reader: Reader, prepared: PreparedSet, num_samples: int, share: Share = WHOLE) -> "HeldOut":
        """Read at most `num_samples` held-out rows, of them this rank's share; holes and answers too short to draft for
        are left out."""
        rows = np.flatnonzero(np.asarray(prepared.heldout, dtype=bool))
        places = np.unique(np.linspace(0, len(rows) - 1, min(num_samples, len(rows))).round().astype(int))
        chosen = rows[places[share.rank :: share.size]]
        # Held-out rows have no place in any epoch's order; a source needs only row and id.
        positions = (Position(0, -1, int(row), prepared.sample_id(int(row))) for row in chosen)
        found = [item for item in reader.read(positions) if not isinstance(item, Hole)]
        kept = [item for item in found if len(eligible_anchors(item.sample.loss_mask))]
        return cls([item.sample for item in kept], [item.features_TF for item in kept])

    def tau(self, drafter: Drafter, head: Head, autocast: bool, ranks: Ranks = ALONE) -> float | None:
        """Teacher-forced τ over all samples of all ranks together; None when there are none."""
        count = self._count(drafter, head, autocast) if self.samples else AcceptanceCount()
        present, num_tokens, num_passes = ranks.sum([len(self.samples), count.num_tokens, count.num_passes])
        if not present:
            return None
        return num_tokens / num_passes if num_passes else 1.0

    def _count(self, drafter: Drafter, head: Head, autocast: bool) -> AcceptanceCount:
        device = drafter.feature_scale.device
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return teacher_forced(drafter, self.features, self.samples, head)
