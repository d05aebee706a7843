"""What the lines of an evaluation add up to; the whole stage runs in tests/integration."""

from typing import Any

import pytest

from headrace.config import EvaluateConfig
from headrace.evaluate.run import summarise


def line(row: int, gained: list[int], verdict: str = "same", floors: bool = True) -> dict[str, Any]:
    passes = {"gained": gained, "offered": [3] * len(gained)}
    single = {"gained": [1] * sum(gained), "offered": [3] * sum(gained)}
    made: dict[str, Any] = {
        "row": row, "source": f"kind {row % 2}", "tokens": sum(gained) + 1, "plain_tokens": sum(gained) + 1,
        "drafter": passes, "seconds": {"plain": 2.0, "speculative": 1.0}, "identity": {"verdict": verdict},
        "floors": {"untrained": single, "prompt_lookup": single},
    }  # fmt: skip
    if floors:
        made["floors"]["no_features"] = single
    return made


LINES = [line(0, [4, 2]), line(1, [3, 1]), line(2, [2, 2, 1])]


def test_tau_is_over_all_prompts_and_floors_are_beside_it() -> None:
    results = summarise(LINES, EvaluateConfig())
    assert results["tau"] == pytest.approx(15 / 7)
    assert results["tau_no_features"] == results["tau_untrained"] == 1.0
    assert results["margin_no_features"]["value"] == pytest.approx(15 / 7 - 1, abs=1e-3)
    assert results["margin_no_features"]["low"] > 0
    assert results["per_task"]["kind 0"] == {"tau": round(11 / 5, 4), "num_prompts": 2}
    assert results["seconds_plain"] == 6.0
    assert results["num_tokens"] == 18


def test_one_answer_that_differs_is_not_identity_and_ties_are_counted() -> None:
    assert summarise(LINES, EvaluateConfig())["greedy_identical"] is True
    tied = summarise([*LINES, line(3, [2], "tie")], EvaluateConfig())
    assert (tied["greedy_identical"], tied["num_ties"]) == (True, 1)
    assert summarise([*LINES, line(3, [2], "differs")], EvaluateConfig())["greedy_identical"] is False


def test_a_floor_that_was_not_trained_is_none() -> None:
    results = summarise([line(0, [4], floors=False)], EvaluateConfig())
    assert results["tau_no_features"] is None
    assert results["margin_no_features"] is None
