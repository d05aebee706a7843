"""Bootstrap intervals over prompts.

In: for each prompt, the tokens gained and the target passes they took. Out: τ and the margin of one proposer over
another, each with an interval. A prompt is the unit that is drawn again: its blocks depend on one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Rounded for a results file."""
        return {"value": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


@dataclass(frozen=True)
class PerPrompt:
    """Tokens gained and target passes, one entry a prompt; a prompt that ends in its prefill has 0 and 0."""

    tokens: Sequence[int]
    passes: Sequence[int]


def tau_interval(counts: PerPrompt, seed: int) -> Interval:
    """τ over all prompts (tokens by passes, so long answers weigh more) with its percentile bootstrap interval."""
    draws_RN = _draws(len(counts.tokens), seed)
    return _interval(_ratio(counts, None), _ratio(counts, draws_RN))


def margin_interval(counts: PerPrompt, floor: PerPrompt, seed: int) -> Interval:
    """τ minus the floor's τ, paired: each resample draws the same prompts for both."""
    draws_RN = _draws(len(counts.tokens), seed)
    value = _ratio(counts, None) - _ratio(floor, None)
    return _interval(value, _ratio(counts, draws_RN) - _ratio(floor, draws_RN))


def _draws(num_prompts: int, seed: int) -> npt.NDArray[np.int64]:
    rng = np.random.Generator(np.random.Philox(key=seed))
    return rng.integers(0, num_prompts, size=(NUM_RESAMPLES, num_prompts), dtype=np.int64)


def _ratio(counts: PerPrompt, draws_RN: npt.NDArray[np.int64] | None) -> npt.NDArray[np.float64]:
    tokens = np.asarray(counts.tokens, dtype=np.float64)
    passes = np.asarray(counts.passes, dtype=np.float64)
    if draws_RN is not None:
        tokens, passes = tokens[draws_RN], passes[draws_RN]
    # Plain decoding gains 1 a pass, so a draw without any pass shows neither gain nor loss.
    total = passes.sum(-1)
    return np.where(total > 0, tokens.sum(-1) / np.maximum(total, 1), 1.0)


def _interval(value: npt.NDArray[np.float64], resampled: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))
