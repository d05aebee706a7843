"""The drafter as a proposer: its context grows with each answer, its blocks become drafted tokens.

In: the tokens so far and the states that the last target pass brought. Out: drafted tokens, greedy or drawn. A block
always runs at its full size, as in training and in the engines; near the limit only its first slots are used.
"""

from collections.abc import Sequence

import torch

from headrace.drafter.draft_vocabulary import target_logits
from headrace.drafter.model import Drafter, Head
from headrace.evaluate.decode import Proposal
from headrace.evaluate.sampling import Sampling
from headrace.taps import Tap, parse_taps


class DrafterProposer:
    """Drafts with a DFlash drafter; features are the concatenated taps, as the raw codec hands them out."""

    def __init__(self, drafter: Drafter, head: Head) -> None:
        shape = drafter.shape
        self.taps: tuple[Tap, ...] = parse_taps(shape.taps, shape.num_target_layers) if shape.features else ()
        self.block_size = shape.block_size
        self._drafter = drafter.eval()
        self._head = head
        self._context = drafter.empty_context()

    def begin(self) -> None:
        """Start from an empty context."""
        self._context = self._drafter.empty_context()

    def propose(self, ids: Sequence[int], states_TLH: torch.Tensor | None, num: int, sampling: Sampling) -> Proposal:
        """Draft after the anchor `ids[-1]` from states strictly before it."""
        anchor, known = len(ids) - 1, self._context.num_tokens
        # The floor without features keeps no keys, only the count of tokens.
        features_TF = torch.zeros(anchor - known, 0) if states_TLH is None else states_TLH.flatten(1)
        self._context = self._drafter.extend_context(self._context, features_TF, known)
        hidden_KH = self._drafter.draft(self._context, ids[-1], anchor, self._head)[:num]
        logits_KV = target_logits(hidden_KH, self._head)
        if sampling.greedy:
            return Proposal(tuple(logits_KV.argmax(-1).tolist()), None)
        probs_KV = sampling.probabilities(logits_KV)
        return Proposal(tuple(sampling.draw(probs_KV)), probs_KV)
