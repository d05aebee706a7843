"""Prompt lookup copies what followed the longest repeated suffix."""

import pytest

from headrace.evaluate.lookup import PromptLookup, find_continuation
from headrace.evaluate.sampling import Sampling


@pytest.mark.parametrize(
    ("ids", "num", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),
        ([1, 2, 3, 1, 2, 9, 1, 2], 1, (9,)),
        ([5, 1, 2, 7, 8, 1, 9, 5, 1, 2], 2, (7, 8)),
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
        ([7, 7], 3, (7,)),
    ],
)
def test_the_latest_occurrence_of_the_longest_suffix_wins(ids: list[int], num: int, expected: tuple[int, ...]) -> None:
    assert find_continuation(ids, 3, num) == expected


def test_a_longer_suffix_beats_a_later_one() -> None:
    assert find_continuation([1, 2, 3, 8, 3, 9, 1, 2, 3], 3, 1) == (8,)
    assert find_continuation([1, 2, 3, 8, 3, 9, 1, 2, 3], 1, 1) == (9,)


def test_a_proposal_is_not_drawn() -> None:
    proposal = PromptLookup(3, 5).propose([4, 5, 4], None, 4, Sampling(1.0))
    assert (proposal.ids, proposal.probs_KV) == ((5, 4), None)
