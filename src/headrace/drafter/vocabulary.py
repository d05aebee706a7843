"""A step's vocabulary: the head's rows that a loss looks at, all of them or a sample.

In: the head, the ids that a step's slots should predict, a number of rows and a generator. Out: a head of these rows
only. Every id that is predicted is among them, the others are drawn without replacement from the rest; each of those
stands for several, so the logarithm of how many is added to its logit: the sum under the softmax is then right on
average (sampled softmax, Bengio and Senecal 2008, with uniform proposals). The cost of a loss is that of its rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from headrace.drafter.model import Head


@dataclass(frozen=True, eq=False)
class SampledHead:
    """Rows of a head.

    `head_VH` and `log_weight_V`: of each row that is looked at, what hidden states are multiplied with and what is
    added to the logit (0 for ids that are predicted); `places` int64 over the whole vocabulary, where a row went.
    """

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    log_weight_V: torch.Tensor
    places: torch.Tensor
    embedding_scale: float
    logit_scale: float
    softcap: float | None


def sample_head(head: Head, predicted: torch.Tensor, num_rows: int, rng: np.random.Generator) -> SampledHead:
    """Keep the rows of `predicted` ids (int64, any shape) and draw others up to `num_rows` in all, at least as many as
    are predicted; all rows when the vocabulary has no more.
    """
    device, size = head.head_VH.device, len(head.head_VH)
    needed = np.unique(predicted.cpu().numpy())
    rest = np.setdiff1d(np.arange(size), needed, assume_unique=True)
    drawn = rng.choice(rest, min(len(rest), max(num_rows - len(needed), len(needed))), replace=False)
    rows = torch.from_numpy(np.concatenate([needed, drawn]).astype(np.int64)).to(device)
    log_weight_V = torch.zeros(len(rows), device=device)
    if len(drawn):
        log_weight_V[len(needed) :] = math.log(len(rest) / len(drawn))
    places = torch.zeros(size, dtype=torch.int64, device=device)
    places[rows] = torch.arange(len(rows), device=device)
    return SampledHead(
        head.embedding_VH,
        head.head_VH[rows],
        log_weight_V,
        places,
        head.embedding_scale,
        head.logit_scale,
        head.softcap,
    )
