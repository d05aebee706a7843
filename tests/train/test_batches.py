import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import OrderConfig, TrainConfig
from headrace.errors import TrainError
from headrace.prepare.prepared import PreparedSet
from headrace.train.batches import (
    Plan,
    Reader,
    Step,
    decode_features,
    plan_steps,
    read_ahead,
    training_steps,
)
from headrace.train.ranks import Share
from tests.train.runs import CODEC, TRAIN, ListSource, record_of, states_of

CFG = TrainConfig(**TRAIN)
ORDER = OrderConfig(window_samples=4)


def steps_from(
    prepared: PreparedSet, source: ListSource, start: tuple[int, int] = (0, 0), known: frozenset[int] = frozenset()
) -> list[Step]:
    plan = plan_steps(prepared, ORDER, CFG)
    return list(training_steps(plan, Reader(prepared, source, CODEC), prepared, CFG, start, set(known)))


def rows(steps: list[Step]) -> list[int]:
    return [s.sample.row for step in steps for batch in step.micro for s in batch]


@pytest.mark.parametrize("size", [2, 4, 7])
def test_ranks_together_take_every_step_of_one_process(prepared: PreparedSet, size: int) -> None:
    plan, whole = plan_steps(prepared, ORDER, CFG), steps_from(prepared, ListSource(prepared))
    sources = [ListSource(prepared) for _ in range(size)]
    ranks = [
        list(training_steps(plan, Reader(prepared, own, CODEC), prepared, CFG, (0, 0), set(), Share(rank, size)))
        for rank, own in enumerate(sources)
    ]
    for step, *parts in zip(whole, *ranks, strict=True):
        assert {(part.epoch, part.start, part.end) for part in parts} == {(step.epoch, step.start, step.end)}
        assert sorted(rows(parts)) == sorted(rows([step]))
        anchors = {s.sample.row: s.anchors_A.tolist() for batch in step.micro for s in batch}
        assert {s.sample.row: s.anchors_A.tolist() for p in parts for b in p.micro for s in b} == anchors
    if size == 7:
        assert any(not part.micro for own in ranks for part in own)


def test_a_hole_that_another_rank_found_is_left_out_from_then_on(prepared: PreparedSet) -> None:
    plan, source, declared = plan_steps(prepared, ORDER, CFG), ListSource(prepared), set[int]()
    steps = training_steps(plan, Reader(prepared, source, CODEC), prepared, CFG, (0, 0), set(), Share(), declared)
    first = next(steps)
    found = rows([first])[0]
    declared.add(found)
    rest = list(steps)
    assert found not in rows(rest)
    assert not any(step.holes for step in rest)  # it was told before
    assert len(source.asked) == 2 * len(set(source.asked))


def test_held_out_rows_are_never_asked_for(prepared: PreparedSet) -> None:
    source = ListSource(prepared)
    steps = steps_from(prepared, source)
    heldout = set(np.flatnonzero(prepared.heldout).tolist())
    assert heldout
    assert not heldout & set(source.asked)
    assert not heldout & set(rows(steps))


def test_every_other_row_is_met_once_an_epoch(prepared: PreparedSet) -> None:
    steps = steps_from(prepared, ListSource(prepared))
    for epoch in range(CFG.epochs):
        met = rows([step for step in steps if step.epoch == epoch])
        assert sorted(met) == np.flatnonzero(~prepared.heldout).tolist()


def test_the_plan_counts_the_steps_that_come(prepared: PreparedSet) -> None:
    assert plan_steps(prepared, ORDER, CFG).num_steps() == len(steps_from(prepared, ListSource(prepared)))


def test_from_any_position_on_the_steps_are_the_same(prepared: PreparedSet) -> None:
    plan = plan_steps(prepared, ORDER, CFG)
    whole = steps_from(prepared, ListSource(prepared))
    for k in range(1, len(whole)):
        source = ListSource(prepared)
        rest = steps_from(prepared, source, plan.after(whole[k - 1].epoch, whole[k - 1].end))
        assert source.asked == rows(whole[k:])
        for a, b in zip(rest, whole[k:], strict=True):
            assert (a.epoch, a.start, a.end) == (b.epoch, b.start, b.end)
            for one, other in zip(a.micro, b.micro, strict=True):
                for x, y in zip(one, other, strict=True):
                    assert x.sample.id == y.sample.id
                    assert np.array_equal(x.anchors_A, y.anchors_A)
                    assert torch.equal(x.features_TF, y.features_TF)


def test_micro_batches_and_steps_stay_within_their_tokens(prepared: PreparedSet) -> None:
    for step in steps_from(prepared, ListSource(prepared)):
        assert step.num_tokens <= CFG.step_tokens
        assert all(sum(s.sample.num_tokens for s in batch) <= CFG.micro_tokens for batch in step.micro)


def test_anchors_change_from_epoch_to_epoch(prepared: PreparedSet) -> None:
    steps = steps_from(prepared, ListSource(prepared))
    drawn: dict[int, list[list[int]]] = {}
    for step in steps:
        for batch in step.micro:
            for s in batch:
                drawn.setdefault(s.sample.row, []).append(s.anchors_A.tolist())
    assert all(len(a) == CFG.anchors for both in drawn.values() for a in both)
    assert any(first != second for first, second in drawn.values())


def test_a_hole_is_left_out_and_told_and_moves_no_step(prepared: PreparedSet) -> None:
    whole = steps_from(prepared, ListSource(prepared))
    with_hole = steps_from(prepared, ListSource(prepared, holes=[3]))
    assert [(s.epoch, s.start, s.end) for s in with_hole] == [(s.epoch, s.start, s.end) for s in whole]
    assert [h.row for s in with_hole for h in s.holes] == [3, 3]
    assert sorted(rows(with_hole)) == sorted(r for r in rows(whole) if r != 3)


def test_a_known_hole_is_not_asked_for(prepared: PreparedSet) -> None:
    source = ListSource(prepared)
    steps = steps_from(prepared, source, known=frozenset([3]))
    assert 3 not in source.asked
    assert rows(steps) == rows(steps_from(prepared, ListSource(prepared, holes=[3])))


def test_the_floor_reads_no_states(prepared: PreparedSet) -> None:
    plan = plan_steps(prepared, ORDER, CFG)
    steps = list(training_steps(plan, Reader(prepared, None, None), prepared, CFG, (0, 0), set()))
    assert rows(steps) == rows(steps_from(prepared, ListSource(prepared)))
    assert {tuple(s.features_TF.shape) for step in steps for b in step.micro for s in b} == {
        (int(n), 0) for n in prepared.lengths[~prepared.heldout]
    }


def test_a_set_that_is_held_out_whole_is_refused() -> None:
    class AllHeldOut:
        heldout = np.ones(3, dtype=bool)
        lengths = np.ones(3, dtype=np.int64)

    with pytest.raises(TrainError, match="held out"):
        plan_steps(AllHeldOut(), ORDER, CFG)  # type: ignore[arg-type]


def test_features_are_the_states_of_all_segments(prepared: PreparedSet) -> None:
    sample = prepared.sample(2)
    features = decode_features(record_of(sample), sample, CODEC)
    assert torch.equal(features, states_of(sample).flatten(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_feature_that_is_not_finite_is_named(prepared: PreparedSet, value: float) -> None:
    sample = prepared.sample(2)
    states = states_of(sample)
    states[7, 1, 3] = value
    with pytest.raises(TrainError, match=rf"row 2 \(id {sample.id.hex()}\)[\s\S]*token 7"):
        decode_features(record_of(sample, states), sample, CODEC)


def test_a_record_of_another_sample_is_refused(prepared: PreparedSet) -> None:
    with pytest.raises(TrainError, match="row 2"):
        decode_features(record_of(prepared.sample(1)), prepared.sample(2), CODEC)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 5))
def test_reading_ahead_changes_nothing(items: list[int], depth: int) -> None:
    assert list(read_ahead(iter(items), depth)) == items


def test_reading_ahead_stays_within_its_depth() -> None:
    made: list[int] = []

    def count() -> Iterator[int]:
        for n in range(100):
            made.append(n)
            yield n

    ahead = read_ahead(count(), 3)
    assert next(ahead) == 0
    time.sleep(0.2)
    assert len(made) <= 5  # one taken, three queued, one in hand
    ahead.close()


def test_an_error_comes_in_its_place() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise TrainError("more", "none", "stop")

    ahead = read_ahead(fail(), 2)
    assert next(ahead) == 1
    with pytest.raises(TrainError, match="expected more"):
        next(ahead)


def test_closing_stops_the_thread() -> None:
    before = threading.active_count()
    ahead = read_ahead(iter(range(1000)), 2)
    next(ahead)
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 5), st.data())
def test_steps_follow_each_other_to_the_end_of_the_run(
    lengths: list[int], step_tokens: int, seed: int, data: st.DataObject
) -> None:
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    if not eligible.any():
        return
    plan = Plan(np.array(lengths), eligible, OrderConfig(window_samples=4, seed=seed), step_tokens, 2)
    at = (0, 0)
    for epoch in range(2):
        for start, end in plan.steps(epoch):
            assert at == (epoch, start)
            at = plan.after(epoch, end)
    assert at == (2, 0)
