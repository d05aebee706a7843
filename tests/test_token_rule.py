"""Which tokens have states: what is left out is never read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.drafter.anchors import supervise
from headrace.errors import ConfigError
from headrace.token_rule import ALL_TOKENS, TokenRule, eligible_anchors

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda bits: np.array(bits, dtype=np.uint8))


def read_by(mask: np.ndarray, block: int, window: int | None) -> set[int]:
    """Tokens whose states any block of any anchor sees: before the anchor and, for any slot, inside the window."""
    seen: set[int] = set()
    for anchor in eligible_anchors(mask).tolist():
        for slot in range(block):
            seen |= {t for t in range(anchor) if window is None or anchor + slot - t < window}
    return seen


@given(mask=MASKS, block=st.integers(2, 6), window=st.one_of(st.none(), st.integers(1, 12)))
def test_everything_that_is_read_is_stored_and_the_ends_are_tight(
    mask: np.ndarray, block: int, window: int | None
) -> None:
    start, end = TokenRule("context", window).span(mask)
    read = read_by(mask, block, window)
    assert read <= set(range(start, end))
    if read:
        assert min(read) == start or eligible_anchors(mask)[0] == 0
        assert max(read) == end - 1


@given(mask=MASKS, block=st.integers(2, 6))
def test_supervised_holds_the_last_state_before_every_supervised_token(mask: np.ndarray, block: int) -> None:
    anchors = eligible_anchors(mask)
    lined_up = supervise(np.arange(len(mask), dtype=np.int32), mask, anchors, block)
    wanted = (lined_up.target_ids[lined_up.supervised] - 1).tolist()
    _, end = TokenRule("supervised").span(mask)
    assert all(token < end for token in wanted)
    assert not wanted or max(wanted) == end - 1


@pytest.mark.parametrize("name", ["all", "context", "supervised", "context/window:7", "supervised/window:2048"])
def test_a_rule_is_read_back_from_its_name(name: str) -> None:
    assert str(TokenRule.parse(name)) == name


@pytest.mark.parametrize("name", ["", "some", "all/window:3", "context/window:0", "context/window:", "context "])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="token rule"):
        TokenRule.parse(name)


def test_all_is_all_and_a_sample_without_anchors_needs_nothing() -> None:
    assert ALL_TOKENS.span(np.zeros(5, dtype=np.uint8)) == (0, 5)
    assert TokenRule("supervised").span(np.array([0, 1, 0], dtype=np.uint8)) == (0, 0)
