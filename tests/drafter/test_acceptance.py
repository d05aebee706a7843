"""τ, by its one definition."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.drafter.acceptance import AcceptanceCount, accept_length, teacher_forced
from headrace.drafter.model import Drafter, head_logits
from headrace.record import Sample
from tests.drafter.tiny import BLOCK, tiny_drafter, tiny_head, tiny_sample

TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(draft=TOKENS, truth=TOKENS)
def test_what_stands_is_the_common_prefix(draft: list[int], truth: list[int]) -> None:
    n = accept_length(draft, truth)
    assert draft[:n] == truth[:n]
    assert n == min(len(draft), len(truth)) or draft[n] != truth[n]


def test_plain_decoding_has_a_tau_of_one() -> None:
    count = AcceptanceCount()
    count.add([1, 1, 1], [0, 0, 0])
    assert count.tau == 1.0
    assert AcceptanceCount().tau == 1.0


def test_tau_is_tokens_over_passes_of_all_samples_together() -> None:
    count = AcceptanceCount()
    count.add([4, 1], [3, 3])
    count.add([2], [3])
    assert count.tau == pytest.approx(7 / 3)


def test_acceptance_by_slot_leaves_the_clipped_pass_out() -> None:
    count = AcceptanceCount()
    count.add([4, 2, 1, 1], [3, 3, 3, 3])
    assert count.per_slot() == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_passes_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="do not pair"):
        AcceptanceCount().add([1, 0], [3, 3])


def walked_one_by_one(drafter: Drafter, features: torch.Tensor, sample: Sample) -> list[int]:
    """Serving, written out: a context that grows, one block a pass, clipped at the end."""
    head = tiny_head()
    anchor = int(np.flatnonzero(sample.loss_mask)[0])
    gained = []
    while anchor + 1 < sample.num_tokens:
        context = drafter.extend_context(drafter.empty_context(), features[:anchor], 0)
        hidden = drafter.draft(context, int(sample.input_ids[anchor]), anchor, head)
        drafted = head_logits(hidden, head).argmax(-1).tolist()
        accepted = 0
        while accepted < BLOCK - 1 and anchor + 1 + accepted < sample.num_tokens:
            if drafted[accepted] != sample.input_ids[anchor + 1 + accepted]:
                break
            accepted += 1
        gained.append(min(accepted + 1, sample.num_tokens - anchor - 1))
        anchor += gained[-1]
    return gained


@torch.no_grad()
def the_drafters_own_words(drafter: Drafter, features: torch.Tensor, sample: Sample) -> Sample:
    """The sample with ids that the drafter would draft, every fifth one spoilt, so that blocks are accepted in part."""
    head, ids = tiny_head(), sample.input_ids.copy()
    anchor = int(np.flatnonzero(sample.loss_mask)[0])
    while anchor + 1 < len(ids):
        context = drafter.extend_context(drafter.empty_context(), features[:anchor], 0)
        drafted = head_logits(drafter.draft(context, int(ids[anchor]), anchor, head), head).argmax(-1).tolist()
        for slot, token in enumerate(drafted, 1):
            if anchor + slot < len(ids):
                ids[anchor + slot] = token if (anchor + slot) % 5 else (token + 1) % 50
        anchor += BLOCK - 1
    return dataclasses.replace(sample, input_ids=ids)


@torch.no_grad()
def test_the_walk_is_what_serving_does() -> None:
    drafter = tiny_drafter()
    pairs = [tiny_sample(num_tokens=n, prompt=p, seed=n) for n, p in ((20, 5), (33, 3), (9, 7), (12, 2))]
    samples = [the_drafters_own_words(drafter, features, sample) for sample, features in pairs]
    features = [f for _, f in pairs]
    count = teacher_forced(drafter, features, samples, tiny_head())
    assert count.gained == [walked_one_by_one(drafter, f, s) for f, s in zip(features, samples, strict=True)]
    assert count.tau > 1.2
    assert any(1 < g < BLOCK for gains in count.gained for g in gains)


def test_every_token_after_the_first_is_gained_once() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample(num_tokens=30, prompt=4)
    count = teacher_forced(drafter, [features], [sample], tiny_head())
    assert sum(count.gained[0]) == 30 - 4 - 1


def test_an_answer_of_one_token_has_no_pass() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample(num_tokens=6, prompt=5)
    count = teacher_forced(drafter, [features], [sample], tiny_head())
    assert count.gained == [[]]


def test_only_the_first_run_of_trained_tokens_is_walked() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample(num_tokens=20, prompt=5)
    mask = sample.loss_mask.copy()
    mask[10:13] = 0
    count = teacher_forced(drafter, [features], [dataclasses.replace(sample, loss_mask=mask)], tiny_head())
    assert sum(count.gained[0]) == 10 - 5 - 1
