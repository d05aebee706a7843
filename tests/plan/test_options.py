import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.options import WAYS, Situation, evaluate_option, hit_share

BASE = Situation(
    codec="raw",
    placement="apart",
    epochs=6,
    size_bytes=1000.0,
    disk_bytes=250.0,
    ram_bytes=0.0,
    prefill_s=3600.0,
    link_s=1800.0,
    train_s=900.0,
    read_s=100.0,
    capture_usd_h=1.0,
    train_usd_h=2.0,
    keep_usd=8.0,
)
SHARES = st.floats(0, 2)


def test_a_store_pays_each_gpu_only_while_it_works() -> None:
    option = evaluate_option("store", replace(BASE, disk_bytes=1000.0))
    assert option.feasible
    assert option.times.wall_s == 3600 + 6 * 900
    assert option.usd == pytest.approx(1.0 * 1 + 2.0 * 1.5 + 8.0)
    assert (option.capture_passes, option.limited_by) == (1, "training")


def test_a_store_that_does_not_fit_says_by_how_much() -> None:
    option = evaluate_option("store", BASE)
    assert not option.feasible
    assert "1,000 B exceed the 250 B" in option.blocked[0]
    assert "not possible" in option.text()


def test_a_stream_goes_at_the_pace_of_the_slowest() -> None:
    option = evaluate_option("stream", BASE)
    assert option.times.wall_s == 6 * 3600
    assert option.limited_by == "prefill"
    assert option.usd == pytest.approx(6 * (1.0 + 2.0))
    assert evaluate_option("stream", replace(BASE, link_s=7200.0)).limited_by == "the link"


def test_a_cache_saves_budget_over_size_after_the_first_epoch() -> None:
    option = evaluate_option("cache", BASE)
    assert option.capture_passes == 6 - 5 * 0.25
    assert option.saved_share == pytest.approx(5 / 6 * 0.25) == hit_share(250, 1000, 6)
    assert option.times.wall_s == 3600 + 5 * 0.75 * 3600
    assert option.usd == pytest.approx(option.times.wall_s / 3600 * 3 + 8 * 0.25)


def test_memory_counts_as_room_too() -> None:
    assert evaluate_option("store", replace(BASE, ram_bytes=750.0)).feasible


def test_in_turns_times_add_and_the_link_is_not_used() -> None:
    turns = replace(BASE, placement="in turns", capture_usd_h=None)
    assert evaluate_option("stream", turns).times.wall_s == 6 * (3600 + 900)
    assert evaluate_option("cache", turns).times.wall_s == 4500 + 5 * (0.75 * 3600 + 900)
    assert evaluate_option("store", replace(turns, disk_bytes=1e9)).usd == pytest.approx(2.0 * 2.5 + 8)


def test_side_by_side_on_one_card_is_only_asked_of_ways_that_need_it() -> None:
    turns = replace(BASE, placement="in turns", disk_bytes=1e9, blocked_together=("too small",))
    assert [evaluate_option(way, turns).feasible for way in WAYS] == [True, False, False]


def test_limits_of_time_and_money_forbid() -> None:
    assert "1 h allowed" in evaluate_option("stream", BASE, max_hours=1).blocked[0]
    assert "$1.00 allowed" in evaluate_option("stream", BASE, max_usd=1).blocked[0]
    assert evaluate_option("stream", BASE, max_hours=100, max_usd=100).feasible


def test_an_unknown_price_leaves_the_cost_open() -> None:
    assert evaluate_option("stream", replace(BASE, capture_usd_h=None)).usd is None
    assert evaluate_option("stream", replace(BASE, train_usd_h=None)).usd is None


def test_a_target_that_does_not_run_is_no_number() -> None:
    option = evaluate_option("cache", replace(BASE, prefill_s=math.inf, disk_bytes=1e9, blocked=("no room",)))
    assert not option.feasible
    assert not math.isnan(option.times.wall_s)


@given(share=SHARES, epochs=st.integers(1, 12))
def test_a_cache_lies_between_stream_and_store(share: float, epochs: int) -> None:
    situation = replace(BASE, disk_bytes=share * 1000, epochs=epochs)
    cache, stream = evaluate_option("cache", situation), evaluate_option("stream", situation)
    assert 1 <= cache.capture_passes <= epochs
    assert cache.saved_share == pytest.approx(hit_share(share * 1000, 1000, epochs))
    assert cache.times.wall_s <= stream.times.wall_s * (1 + 1e-9)


@given(low=SHARES, more=SHARES)
def test_more_room_is_never_slower(low: float, more: float) -> None:
    small, large = (evaluate_option("cache", replace(BASE, disk_bytes=b * 1000)) for b in (low, low + more))
    assert large.times.wall_s <= small.times.wall_s + 1e-6
