import os
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import (
    CaptureGroup,
    capture_groups,
    epoch_order,
    global_steps,
    group_of_rows,
    id_fraction,
    is_kept,
    micro_batches,
    server_of,
    share_within,
    split_over_ranks,
    windows,
)
from headrace.record import digest

LENGTHS = st.lists(st.integers(0, 300), max_size=120).map(lambda v: np.array(v, np.int64))
WINDOW = st.integers(1, 50)
BUDGET = st.integers(1, 2000)
SEED = st.integers(0, 2**63)


@given(num_samples=st.integers(0, 500), window=WINDOW)
def test_windows_cover_every_row_once_in_order(num_samples: int, window: int) -> None:
    cut = windows(num_samples, window)
    assert [row for w in cut for row in w] == list(range(num_samples))
    assert all(len(w) == window for w in cut[:-1])


@given(lengths=LENGTHS, window=WINDOW, budget=BUDGET)
def test_capture_groups_cover_every_row_once_inside_its_window(lengths, window: int, budget: int) -> None:
    groups = capture_groups(lengths, window, budget)
    assert sorted(row for g in groups for row in g.rows) == list(range(len(lengths)))
    for g in groups:
        assert {row // window for row in g.rows} == {g.window}
        assert g.padded_tokens == max(lengths[list(g.rows)])
        assert g.padded_tokens * len(g.rows) <= budget or len(g.rows) == 1 or g.padded_tokens == 0
    for w in {g.window for g in groups}:
        assert [g.index for g in groups if g.window == w] == list(range(sum(g.window == w for g in groups)))


@given(lengths=LENGTHS, window=WINDOW, budget=BUDGET)
def test_a_capture_group_depends_on_its_window_alone(lengths, window: int, budget: int) -> None:
    """More data behind a window must not change how its rows are padded: its stored bits would change."""
    groups = capture_groups(lengths, window, budget)
    more = capture_groups(np.concatenate([lengths, [7, 300, 1]]), window, budget)
    whole = len(lengths) // window
    assert [g for g in groups if g.window < whole] == [g for g in more if g.window < whole]


def test_a_group_of_similar_lengths_is_fixed() -> None:
    lengths = np.array([10, 40, 12, 38, 11, 9], np.int64)
    assert capture_groups(lengths, 4, 80) == [
        CaptureGroup(0, 0, (1, 3), 40),
        CaptureGroup(0, 1, (2, 0), 12),
        CaptureGroup(1, 0, (4, 5), 11),
    ]


@given(eligible=st.lists(st.booleans(), max_size=200), window=WINDOW, seed=SEED, epoch=st.integers(0, 100))
def test_an_epoch_visits_every_eligible_row_once_and_no_other(eligible, window: int, seed: int, epoch: int) -> None:
    mask = np.array(eligible, np.bool_)
    order = epoch_order(mask, window, seed, epoch)
    assert sorted(order.tolist()) == np.flatnonzero(mask).tolist()
    # A window is met as one run: its rows are captured, stored and read together.
    met = [w for k, w in enumerate(order // window) if k == 0 or order[k - 1] // window != w]
    assert len(met) == len(set(met))


@given(window=WINDOW, seed=SEED, epoch=st.integers(0, 100))
def test_an_order_is_a_pure_function_of_seed_and_epoch(window: int, seed: int, epoch: int) -> None:
    eligible = np.ones(97, np.bool_)
    np.random.seed(1)
    first = epoch_order(eligible, window, seed, epoch)
    np.random.seed(2)
    np.random.random(10)
    assert np.array_equal(first, epoch_order(eligible, window, seed, epoch))


def test_another_seed_or_epoch_is_another_order() -> None:
    eligible = np.ones(200, np.bool_)
    orders = [tuple(epoch_order(eligible, 16, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_an_order_stays_what_it_is_between_releases() -> None:
    """A checkpoint holds a position; another order under it would train some samples twice and others never."""
    eligible = np.ones(12, np.bool_)
    eligible[[3, 7]] = False
    assert epoch_order(eligible, 4, seed=5, epoch=2).tolist() == ORDER_5_2


ORDER_5_2 = [1, 2, 0, 6, 4, 5, 9, 11, 10, 8]


@given(lengths=LENGTHS, budget=BUDGET, seed=SEED)
def test_steps_cover_every_position_once_within_the_budget(lengths, budget: int, seed: int) -> None:
    order = epoch_order(np.ones(len(lengths), np.bool_), 16, seed, 0)
    steps = global_steps(order, lengths, budget)
    assert [p for a, b in steps for p in range(a, b)] == list(range(len(order)))
    for k, (a, b) in enumerate(steps):
        filled = int(lengths[order[a:b]].sum())
        assert b > a
        assert filled <= budget or b - a == 1
        if k + 1 < len(steps):  # the next sample did not fit any more
            assert filled + int(lengths[order[b]]) > budget


@given(lengths=LENGTHS, budget=BUDGET, seed=SEED, num_ranks=st.integers(1, 8))
def test_ranks_share_each_step_without_overlap_or_loss(lengths, budget: int, seed: int, num_ranks: int) -> None:
    order = epoch_order(np.ones(len(lengths), np.bool_), 16, seed, 0)
    steps = global_steps(order, lengths, budget)
    seen: list[int] = []
    num_steps = [0] * num_ranks
    for step in steps:
        shares = split_over_ranks(step, order, lengths, num_ranks)
        assert len(shares) == num_ranks
        for rank, share in enumerate(shares):
            assert share == sorted(share)
            num_steps[rank] += 1  # an empty share is a step all the same
        together = sorted(p for share in shares for p in share)
        assert together == list(range(*step))
        seen += together
        loads = [int(lengths[order[share]].sum()) for share in shares]
        assert max(loads) - min(loads) <= max(lengths[order[range(*step)]])
    assert seen == list(range(len(order)))
    assert set(num_steps) == {len(steps)}


@given(lengths=LENGTHS, budget=BUDGET, seed=SEED)
def test_the_cuts_into_steps_do_not_depend_on_the_number_of_ranks(lengths, budget: int, seed: int) -> None:
    order = epoch_order(np.ones(len(lengths), np.bool_), 16, seed, 0)
    epochs = []
    for num_ranks in range(1, 9):
        steps = global_steps(order, lengths, budget)
        epochs.append([sorted(chain(*split_over_ranks(s, order, lengths, num_ranks))) for s in steps])
    assert all(epoch == epochs[0] for epoch in epochs)


@given(lengths=LENGTHS, budget=BUDGET, seed=SEED, num_readers=st.integers(1, 6), data=st.data())
def test_any_number_of_readers_meets_the_same_positions(lengths, budget, seed, num_readers, data) -> None:
    """Each reader computes the order for itself, from lengths alone, and takes its share of each step."""
    held_out = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))), np.bool_)
    met = []
    for reader in range(num_readers):
        order = epoch_order(~held_out, 16, seed, 3)
        for step in global_steps(order, lengths, budget):
            met += [int(order[p]) for p in split_over_ranks(step, order, lengths, num_readers)[reader]]
    assert sorted(met) == np.flatnonzero(~held_out).tolist()


@given(lengths=LENGTHS, budget=BUDGET)
def test_micro_batches_keep_order_and_budget(lengths, budget: int) -> None:
    order = np.arange(len(lengths))[::-1].copy()
    positions = list(range(0, len(lengths), 2))
    batches = micro_batches(positions, order, lengths, budget)
    assert [p for b in batches for p in b] == positions
    assert all(b for b in batches)
    assert all(lengths[order[b]].sum() <= budget or len(b) == 1 for b in batches)


@pytest.mark.parametrize("cut", [lambda: windows(3, 0), lambda: global_steps(np.zeros(1, int), np.ones(1, int), 0)])
def test_sizes_below_one_are_refused(cut) -> None:
    with pytest.raises(ConfigError):
        cut()


def test_the_kept_subset_is_fixed_by_content_and_grows_with_the_share() -> None:
    ids = [digest(n.to_bytes(4, "little")) for n in range(4000)]
    kept = {share: {own for own in ids if is_kept(own, share)} for share in (0.0, 0.25, 0.5, 1.0)}
    assert kept[0.0] < kept[0.25] < kept[0.5] < kept[1.0] == set(ids)
    assert kept[0.0] == set()
    assert abs(len(kept[0.25]) - 1000) < 150


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 1000))
def test_a_share_within_bytes_is_the_largest_that_fits(sizes: list[int], max_bytes: int) -> None:
    ids = [digest(n.to_bytes(4, "little")) for n in range(len(sizes))]
    share = share_within(ids, sizes, max_bytes)
    held = sum(size for own, size in zip(ids, sizes, strict=True) if is_kept(own, share))
    left = [(id_fraction(own), size) for own, size in zip(ids, sizes, strict=True) if not is_kept(own, share)]
    assert held <= max_bytes
    assert not left or held + min(left)[1] > max_bytes


@given(lengths=LENGTHS, window=WINDOW, budget=BUDGET)
def test_every_row_is_found_in_its_group(lengths, window: int, budget: int) -> None:
    groups = capture_groups(lengths, window, budget)
    group_of = group_of_rows(groups, len(lengths))
    assert all(row in groups[group_of[row]].rows for row in range(len(lengths)))


def test_every_sample_has_one_server_and_each_server_its_share() -> None:
    ids = [os.urandom(16) for _ in range(4000)]
    shares = Counter(server_of(id, 4) for id in ids)
    assert set(shares) == set(range(4))
    assert max(shares.values()) < 1200
    assert [server_of(id, 1) for id in ids[:3]] == [0, 0, 0]
    assert [server_of(id, 4) for id in ids] == [server_of(id, 4) for id in ids]


def test_servers_do_not_follow_the_bits_that_say_what_is_kept() -> None:
    """Of the samples whose first bytes are small, each of two servers has about a half."""
    kept = [os.urandom(1)[:0] + bytes(8) + os.urandom(8) for _ in range(2000)]
    assert 850 < sum(server_of(id, 2) for id in kept) < 1150
