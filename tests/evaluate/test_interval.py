"""Intervals hold the value, are paired, and depend on their seed alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.evaluate.interval import PerPrompt, margin_interval, tau_interval

PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=20)


@settings(max_examples=25)
@given(prompts=PROMPTS)
def test_an_interval_holds_its_value(prompts: list[tuple[int, int]]) -> None:
    passes = [p for _, p in prompts]
    counts = PerPrompt([p * k for k, p in prompts], passes)
    found = tau_interval(counts, 0)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9
    assert found.value == pytest.approx(sum(counts.tokens) / sum(passes))
    assert tau_interval(counts, 0) == found


def test_a_margin_is_paired() -> None:
    rng = np.random.default_rng(0)
    floor = PerPrompt(rng.integers(10, 90, 40).tolist(), [10] * 40)
    better = PerPrompt([t + 3 for t in floor.tokens], [10] * 40)
    margin = margin_interval(better, floor, 0)
    assert margin.value == pytest.approx(0.3)
    assert (margin.low, margin.high) == pytest.approx((0.3, 0.3))
    alone = tau_interval(better, 0)
    assert alone.high - alone.low > 0.5


def test_no_pass_at_all_is_a_tau_of_one() -> None:
    assert tau_interval(PerPrompt([0], [0]), 0).value == 1.0
    assert margin_interval(PerPrompt([0], [0]), PerPrompt([0], [0]), 0).to_json() == {"value": 0, "low": 0, "high": 0}
