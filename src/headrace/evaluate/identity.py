"""Greedy identity: a speculative answer is the target's own greedy answer, or parts from it at a tie.

In: two answers as ids and, for each token of the plain one, the gap between the target's two best logits. Out: same,
tie or differs, and where. Speculation verifies several tokens in one pass, whose float32 sums round differently from
one-token passes; only where the two best logits nearly meet can that choose another token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Identity:
    """How two answers compare; `token` is the index of the first divergence in the answer, -1 if there is none."""

    verdict: Literal["same", "tie", "differs"]
    token: int = -1
    gap: float = 0.0


def compare(
    plain_ids: Sequence[int], speculative_ids: Sequence[int], gaps: Sequence[float], tie_gap: float
) -> Identity:
    """Compare a speculative answer with the plain one.

    Args:
        gaps: top-1 minus top-2 logit of the plain run at each of its tokens (no unit), as many as `plain_ids`.
        tie_gap: largest gap that counts as a tie. An answer that only stops earlier or later has no tie to blame.
    """
    for token, (plain, speculative) in enumerate(zip(plain_ids, speculative_ids, strict=False)):
        if plain != speculative:
            gap = gaps[token]
            return Identity("tie" if gap <= tie_gap else "differs", token, gap)
    if len(plain_ids) != len(speculative_ids):
        return Identity("differs", min(len(plain_ids), len(speculative_ids)))
    return Identity("same")
