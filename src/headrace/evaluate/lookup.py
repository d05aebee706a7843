"""Prompt lookup: the floor that needs no drafter at all.

In: the tokens so far. Out: the tokens that followed the latest earlier occurrence of the longest suffix that has one.
Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), as transformers offers it; our own code.
"""

from collections.abc import Sequence

import torch

from headrace.evaluate.decode import Proposal
from headrace.evaluate.sampling import Sampling


def find_continuation(ids: Sequence[int], longest_ngram: int, num: int) -> tuple[int, ...]:
    """The up to `num` tokens after the latest earlier occurrence of the longest suffix of `ids`.

    A suffix has 1 to `longest_ngram` tokens; the longest one that occurs before wins. Nothing found: nothing drafted.
    """
    tokens = tuple(ids)
    for size in range(min(longest_ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + num]
    return ()


class PromptLookup:
    """A proposer that copies from the tokens so far."""

    taps = ()

    def __init__(self, longest_ngram: int, block_size: int) -> None:
        """Args: block_size: tokens of a block, the anchor included, as for the drafter it is compared with."""
        self._longest_ngram = longest_ngram
        self.block_size = block_size

    def begin(self) -> None:
        """Nothing is kept between answers."""

    def propose(self, ids: Sequence[int], states_TLH: torch.Tensor | None, num: int, sampling: Sampling) -> Proposal:
        """Draft without drawing; the states are not read."""
        return Proposal(find_continuation(ids, self._longest_ngram, num), None)
