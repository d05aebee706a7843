"""The drafter as a proposer."""

import torch

from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from tests.evaluate.conftest import BLOCK, TAPS, Pair, plain


def test_states_may_come_in_parts(pair: Pair) -> None:
    ids = pair.prompts[0]
    given = plain(pair.target, ids)
    states = given.states_TLH
    assert states is not None
    whole, parts = DrafterProposer(pair.drafter, pair.head), DrafterProposer(pair.drafter, pair.head)
    so_far = [*ids, *given.ids[:3]]
    parts.propose([*ids, given.ids[0]], states[: len(ids)], BLOCK - 1, Sampling())
    found = parts.propose(so_far, states[len(ids) : len(ids) + 2], BLOCK - 1, Sampling())
    assert found.ids == whole.propose(so_far, states[: len(ids) + 2], BLOCK - 1, Sampling()).ids
    parts.begin()
    assert parts.propose(so_far, states[: len(ids) + 2], BLOCK - 1, Sampling()).ids == found.ids


def test_fewer_tokens_are_the_first_of_the_block(pair: Pair) -> None:
    ids = pair.prompts[0]
    states = plain(pair.target, ids).states_TLH
    assert states is not None
    proposer = DrafterProposer(pair.drafter, pair.head)
    block = proposer.propose([*ids, 9], states[: len(ids)], BLOCK - 1, Sampling()).ids
    proposer.begin()
    assert proposer.propose([*ids, 9], states[: len(ids)], 2, Sampling()).ids == block[:2]
    assert proposer.taps == TAPS


def test_sampled_drafts_come_with_their_distributions(pair: Pair) -> None:
    ids = pair.prompts[0]
    states = plain(pair.target, ids).states_TLH
    assert states is not None
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(0))
    proposal = DrafterProposer(pair.drafter, pair.head).propose([*ids, 9], states[: len(ids)], 3, sampling)
    assert proposal.probs_KV is not None
    torch.testing.assert_close(proposal.probs_KV.sum(-1), torch.ones(3))
