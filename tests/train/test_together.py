import signal
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from headrace.errors import TrainError
from headrace.source import Hole
from headrace.train.batches import Step
from headrace.train.checkpoint import Checkpoint, RunState
from headrace.train.ranks import ALONE, Ranks, Share
from headrace.train.together import (
    agree_to_end,
    check_agreement,
    check_alike,
    received_checkpoint,
    share_step,
)

Value = TypeVar("Value")


class Scripted(Ranks):
    """A rank whose peers' answers are written down: what is added to its sums, and what the first rank says."""

    def __init__(self, rank: int, size: int, others: Sequence[Any] = (), first: Any = None) -> None:
        self.share = Share(rank, size)
        self.others, self.decided = list(others), first

    def sum(self, values: Sequence[float]) -> list[float]:
        other = self.others.pop(0) if self.others else [0.0] * len(values)
        return [a + b for a, b in zip(values, other, strict=True)]

    def gather(self, value: Value) -> list[Value]:
        return [value, {3: "no states"}]  # type: ignore[list-item]

    def decide(self, value: Value) -> Value:
        return value if self.first else self.decided


def test_alone_a_step_is_told_as_it_is() -> None:
    told = share_step(Step(0, 0, 2, [], [Hole(7, b"x", "too long")], waited_s=1.5), ALONE)
    assert (told.num_tokens, told.waited_s, told.holes) == (0, 1.5, {7: "too long"})


def test_holes_waits_and_tokens_of_all_ranks_are_put_together() -> None:
    ranks = Scripted(1, 2, [[40.0, 1.0, 9.0, 0.0]])
    told = share_step(Step(0, 0, 2, [], [], waited_s=1.5), ranks)
    assert (told.num_tokens, told.waited_s, told.holes) == (40, 9.0, {3: "no states"})


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [
        (None, [0.0, 0.0, 0.0], (None, False)),
        (None, [1.0, 0.0, 0.0], (signal.SIGTERM, False)),
        (signal.SIGINT, [1.0, 0.0, 1.0], (signal.SIGTERM, True)),
        (signal.SIGINT, [0.0, 0.0, 0.0], (signal.SIGINT, False)),
    ],
)
def test_a_signal_to_any_rank_ends_all_and_the_first_says_when_to_save(
    own: signal.Signals | None, others: list[float], found: tuple[signal.Signals | None, bool]
) -> None:
    assert agree_to_end(own, True, Scripted(1, 2, [others])) == found  # its own clock does not count
    assert agree_to_end(own, True, Scripted(0, 2, [others]))[1] is True


def test_a_rank_with_other_settings_is_told_which() -> None:
    check_alike({"train.lr": 1.0}, Scripted(1, 2, first={"train.lr": 1.0}))
    with pytest.raises(TrainError, match=r"train\.lr 2\.0 on every rank.*found 1\.0 on rank 1"):
        check_alike({"train.lr": 1.0}, Scripted(1, 2, first={"train.lr": 2.0}))


def test_weights_that_came_apart_are_named() -> None:
    module: Any = torch.nn.Linear(2, 2)
    sums = tuple(float(p.detach().double().abs().sum()) for p in module.parameters())
    check_agreement(module, Scripted(1, 2, first=sums))
    with pytest.raises(TrainError, match="bias"):
        check_agreement(module, Scripted(1, 2, first=(sums[0], sums[1] * 1.001)))
    with pytest.raises(TrainError, match="weight"):
        check_agreement(module, Scripted(1, 2, first=(float("nan"), sums[1])))


def test_alone_the_checkpoint_is_the_one_found() -> None:
    one = Checkpoint({}, {}, RunState(1, 0, 0, 1))
    assert received_checkpoint(one, ALONE) is one
    assert received_checkpoint(None, ALONE) is None
    assert received_checkpoint(None, Scripted(0, 2)) is None
