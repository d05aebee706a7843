"""Replay: fresh steps stay as they were, further draws come from recent ones, and a resumed run does not differ."""

from itertools import pairwise

import numpy as np
import pytest

from headrace.config import OrderConfig, TrainConfig
from headrace.prepare.prepared import PreparedSet
from headrace.train.batches import Plan, Reader, Step, plan_steps, training_steps
from headrace.train.replay import replayed_steps
from tests.train.runs import CODEC, TRAIN, ListSource

ORDER = OrderConfig(window_samples=4)
CFG = TrainConfig(**{**TRAIN, "draws": 3, "replay_steps": 2})


def plan_of(prepared: PreparedSet) -> Plan:
    return plan_steps(prepared, ORDER, CFG)


def steps_from(
    prepared: PreparedSet,
    start: tuple[int, int, int] = (0, 0, 0),
    cfg: TrainConfig = CFG,
    holes: frozenset[int] = frozenset(),
) -> list[Step]:
    reader = Reader(prepared, ListSource(prepared), CODEC)
    return list(replayed_steps(plan_of(prepared), reader, prepared, cfg, start, set(holes)))


def content(step: Step) -> list[tuple[int, list[int]]]:
    return [(s.sample.row, s.anchors_A.tolist()) for batch in step.micro for s in batch]


def rows(step: Step) -> set[int]:
    return {row for row, _ in content(step)}


def test_fresh_steps_are_those_of_a_run_without_replay(prepared: PreparedSet) -> None:
    reader = Reader(prepared, ListSource(prepared), CODEC)
    plain = list(training_steps(plan_of(prepared), reader, prepared, CFG, (0, 0), set()))
    steps = steps_from(prepared)
    assert len(steps) == 3 * len(plain)
    assert [content(step) for step in steps if step.draw == 0] == [content(step) for step in plain]
    assert [step.draw for step in steps[:6]] == [0, 1, 2, 0, 1, 2]


def test_further_draws_come_from_recent_steps_with_other_anchors(prepared: PreparedSet) -> None:
    steps = steps_from(prepared)
    fresh: list[Step] = []
    chosen = set()
    for step in steps:
        if step.draw == 0:
            fresh.append(step)
            continue
        ages = [age for age, own in enumerate(reversed(fresh[-2:])) if rows(own) == rows(step)]
        assert ages, "a draw is a recent step"
        chosen.add(ages[0])
        assert (step.epoch, step.start, step.end) == (fresh[-1].epoch, fresh[-1].start, fresh[-1].end)
        assert not step.holes
    assert chosen == {0, 1}
    own = [content(step) for step in steps if rows(step) == rows(steps[0]) and step.epoch == 0]
    assert len(own) > 1
    assert any(a != b for a, b in pairwise(own))
    assert all(len(anchors) == len(set(anchors)) == 4 for _, anchors in content(steps[1]))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 11, 16])
def test_a_resumed_run_goes_on_with_the_same_steps(prepared: PreparedSet, number: int) -> None:
    steps = steps_from(prepared)
    at = steps[number]
    again = steps_from(prepared, (at.epoch, at.start, at.draw))
    assert [content(step) for step in again] == [content(step) for step in steps[number:]]
    assert [(s.epoch, s.start, s.draw) for s in again] == [(s.epoch, s.start, s.draw) for s in steps[number:]]


def test_without_replay_no_step_is_read_twice_on_resume(prepared: PreparedSet) -> None:
    source = ListSource(prepared)
    once = CFG.model_copy(update={"draws": 1})
    plan = plan_of(prepared)
    start = plan.steps(0)[1][0]
    list(replayed_steps(plan, Reader(prepared, source, CODEC), prepared, once, (0, start, 0), set()))
    assert len(source.asked) == 2 * int(np.sum(~prepared.heldout)) - start
