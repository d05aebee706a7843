"""Speculation is lossless, and τ is counted by its one definition."""

import pytest
import torch

from headrace.drafter.acceptance import AcceptanceCount, teacher_forced
from headrace.drafter.model import Drafter
from headrace.errors import EvaluateError
from headrace.evaluate.decode import Decoded, Proposal, decode, decode_plain
from headrace.evaluate.lookup import PromptLookup
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier, ReplayVerifier
from headrace.record import Sample
from tests.evaluate.conftest import BLOCK, LIMIT, TAPS, Pair, plain, prompts, shape


class Oracle:
    """Drafts from a known answer, right for `right` tokens of each block and wrong behind them."""

    taps = ()
    block_size = BLOCK

    def __init__(self, answer: list[int], right: int) -> None:
        self.answer, self.right = answer, right

    def begin(self) -> None:
        pass

    def propose(self, ids: list[int], states: object, num: int, sampling: Sampling) -> Proposal:
        known = self.answer[len(ids) : len(ids) + num]
        wrong = [(token + 1) % 60 if place >= self.right else token for place, token in enumerate(known)]
        return Proposal(tuple([*wrong, 7, 7, 7, 7][:num]), None)


def speculate(pair: Pair, proposer: object, ids: list[int], limit: int = LIMIT, stops: object = None) -> Decoded:
    with LiveVerifier(pair.target, proposer.taps) as live:  # type: ignore[attr-defined]
        stop_ids = pair.target.stop_ids if stops is None else stops
        return decode(live, proposer, ids, limit, stop_ids, Sampling())  # type: ignore[arg-type]


def test_plain_decoding_is_the_targets_own_generate(pair: Pair) -> None:
    for ids in pair.prompts:
        ours = plain(pair.target, ids)
        theirs = pair.target.model.generate(
            torch.tensor([ids]), max_new_tokens=LIMIT, do_sample=False, attention_mask=torch.ones(1, len(ids))
        )
        assert ours.ids == theirs[0, len(ids) :].tolist()


@pytest.mark.parametrize("right", range(BLOCK))
def test_any_share_of_right_drafts_gives_the_plain_answer(pair: Pair, right: int) -> None:
    for ids in pair.prompts[:4]:
        expected = plain(pair.target, ids)
        found = speculate(pair, Oracle([*ids, *expected.ids], right), ids)
        assert found.ids == expected.ids
        assert found.gained[:-1] == [min(right, BLOCK - 1) + 1] * (len(found.gained) - 1)
        assert sum(found.gained) == len(expected.ids) - 1


def test_the_drafter_gives_the_plain_answer_in_fewer_passes(pair: Pair) -> None:
    count = AcceptanceCount()
    for ids in pair.prompts:
        expected = plain(pair.target, ids)
        found = speculate(pair, DrafterProposer(pair.drafter, pair.head), ids)
        assert found.ids == expected.ids
        count.add(found.gained, found.offered)
    assert count.tau > 1.2


def test_an_end_marker_inside_a_block_ends_the_answer(pair: Pair) -> None:
    ids = pair.prompts[0]
    full = plain(pair.target, ids).ids
    stop = full[6]
    first = full.index(stop)
    found = speculate(pair, Oracle([*ids, *full], BLOCK), ids, stops={stop})
    assert found.ids == full[: first + 1]
    assert sum(found.gained) == first


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 11])
def test_the_limit_clips_the_last_block(pair: Pair, limit: int) -> None:
    ids = pair.prompts[1]
    expected = plain(pair.target, ids, limit=limit)
    found = speculate(pair, Oracle([*ids, *plain(pair.target, ids).ids], BLOCK), ids, limit)
    assert found.ids == expected.ids
    assert sum(found.gained) == len(expected.ids) - 1


def test_a_replay_counts_what_the_live_target_counts(pair: Pair) -> None:
    for proposer in (DrafterProposer(pair.drafter, pair.head), PromptLookup(3, BLOCK)):
        for ids in pair.prompts:
            given = plain(pair.target, ids)
            live = speculate(pair, proposer, ids)
            replayed = decode(ReplayVerifier(given), proposer, ids, LIMIT, pair.target.stop_ids, Sampling())
            assert (replayed.ids, replayed.gained, replayed.offered) == (live.ids, live.gained, live.offered)


def test_serving_counts_what_the_trainers_walk_counts(pair: Pair) -> None:
    import numpy as np

    for ids in pair.prompts:
        given = plain(pair.target, ids)
        found = speculate(pair, DrafterProposer(pair.drafter, pair.head), ids)
        whole = np.array([*ids, *given.ids], dtype=np.int32)
        mask = (np.arange(len(whole)) >= len(ids)).astype(np.uint8)
        features = torch.cat((given.states_TLH.flatten(1), torch.zeros(1, len(TAPS) * 32)))  # type: ignore[union-attr]
        walked = teacher_forced(pair.drafter, [features], [Sample(0, b"", whole, mask)], pair.head)
        assert walked.gained == [found.gained]


def test_the_floor_without_features_decodes_too(pair: Pair) -> None:
    import dataclasses

    floor = Drafter(dataclasses.replace(shape(), features=False), seed=0)
    proposer = DrafterProposer(floor, pair.head)
    assert proposer.taps == ()
    assert speculate(pair, proposer, pair.prompts[0]).ids == plain(pair.target, pair.prompts[0]).ids


def test_sampled_answers_depend_on_their_generator_alone(pair: Pair) -> None:
    def sampled(seed: int) -> list[int]:
        sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(seed))
        with LiveVerifier(pair.target, TAPS) as live:
            proposer = DrafterProposer(pair.drafter, pair.head)
            return decode(live, proposer, pair.prompts[0], LIMIT, pair.target.stop_ids, sampling).ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_empty_prompts_and_limits_are_refused(pair: Pair) -> None:
    with pytest.raises(EvaluateError, match="at least one token"):
        speculate(pair, PromptLookup(3, BLOCK), [])
    with pytest.raises(EvaluateError, match="at least one token"), LiveVerifier(pair.target, ()) as live:
        decode_plain(live, prompts(1, 0)[0], 0, set(), Sampling())
