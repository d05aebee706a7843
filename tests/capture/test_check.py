import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.capture.check import check_states
from headrace.taps import Tap

TAPS = (Tap("after_block", 1), Tap("after_block", 3))
IDS = np.array([5, 6, 7, 5, 9, 6], dtype=np.int32)


def good(seed: int = 0) -> torch.Tensor:
    return torch.randn(len(IDS), 2, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(states: torch.Tensor) -> str | None:
    return check_states(states, IDS, TAPS, 16)


@given(st.integers(0, 2**32))
def test_honest_states_pass(seed: int) -> None:
    assert check(good(seed)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@given(token=st.integers(0, 5), tap=st.integers(0, 1), place=st.integers(0, 15))
def test_one_number_that_is_not_finite_is_found(value: float, token: int, tap: int, place: int) -> None:
    states = good()
    states[token, tap, place] = value
    assert check(states) == f"not finite at token {token}, {TAPS[tap]} (1 of 12 in all)"


@given(token=st.integers(0, 5), tap=st.integers(0, 1), value=st.sampled_from([0.0, 1.5]))
def test_a_token_without_content_is_found(token: int, tap: int, value: float) -> None:
    states = good()
    states[token, tap] = value
    word = "all zero" if value == 0 else "all 1.5"
    assert check(states) == f"{word} at token {token}, {TAPS[tap]} (1 of 12 in all)"


@pytest.mark.parametrize("shape", [(5, 2, 16), (7, 2, 16), (6, 1, 16), (6, 2, 8)])
def test_another_number_of_tokens_taps_or_numbers_is_found(shape: tuple[int, ...]) -> None:
    assert "for tokens, taps and width [6, 2, 16]" in str(check(torch.ones(shape)))


def test_rows_of_another_token_are_found() -> None:
    states = good()
    states[4, 1] = states[1, 1]
    assert check(states) == "tokens 1 and 4 differ but have the same states at after_block:3"


def test_a_stale_buffer_that_repeats_is_found() -> None:
    states = good()
    states[3:] = states[:3].clone()
    assert "differ but have the same states" in str(check(states))


def test_equal_tokens_may_have_equal_states() -> None:
    states = good()
    states[3] = states[0]
    states[5] = states[1]
    assert check(states) is None


def test_one_token_passes() -> None:
    assert check_states(good()[:1], IDS[:1], TAPS, 16) is None
