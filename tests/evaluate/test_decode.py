"""Speculation is lossless, and τ is counted by its one definition."""

import pytest
import torch

from headrace.drafter.acceptance import AcceptanceCount, teacher_forced
from headrace.drafter.model import Drafter
from headrace.errors import EvaluateError
from headrace.evaluate.decode import Decoded, Proposal, Verified, decode, decode_plain
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


class Chain:
    """A target and a drafter at once: token x is followed by y with the logit of its table."""

    taps = ()
    block_size = 4

    def __init__(self, seed: int) -> None:
        self.logits = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) * 1.5

    def begin(self) -> None:
        pass

    def feed(self, ids: list[int], last_only: bool = False) -> Verified:
        logits = self.logits[ids[-1:] if last_only else ids]
        return Verified(logits.argmax(-1).tolist(), logits, None)

    def keep(self, num_tokens: int) -> None:
        pass

    def propose(self, ids: list[int], states: object, num: int, sampling: Sampling) -> Proposal:
        """Each slot's distribution is that after the anchor, as a block drafts without seeing its own choices."""
        probs = sampling.probabilities(self.logits[[ids[-1]] * num])
        return Proposal(tuple(sampling.draw(probs)), probs)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_sampled_answers_follow_the_targets_distribution(temperature: float, top_p: float) -> None:
    target, drafter = Chain(1), Chain(2)
    sampling = Sampling(temperature, top_p, torch.Generator().manual_seed(0))
    counts = torch.zeros(8, 8, 8)
    num_accepted = 0
    for _ in range(4000):
        answer = decode(target, drafter, [3], 3, (), sampling)  # type: ignore[arg-type]
        counts[tuple(answer.ids)] += 1
        num_accepted += sum(answer.gained) - len(answer.gained)
    after = sampling.probabilities(target.logits)
    expected = after[3][:, None, None] * after[:, :, None] * after[None]
    # The second and third token are a block's; 64 cells of 4000 draws stray by about 0.05 in total variation.
    found, wanted = counts.sum(0) / counts.sum(), expected.sum(0)
    assert float((found - wanted).abs().sum()) / 2 < 0.06
    assert not counts[expected == 0].any()
    assert num_accepted > 500, "nothing was accepted, so nothing was tested"
    drafted = sampling.probabilities(drafter.logits)
    unchecked = (drafted[3][:, None, None] * drafted[:, :, None] * drafted[None]).sum(0)
    assert float((unchecked - wanted).abs().sum()) / 2 > 0.2, "the check could not tell the two apart"
