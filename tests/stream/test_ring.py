import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.stream.ring import OWED_S, STALE_S, Key, RecordRing
from headrace.testing.states import fake_record

RECORD = fake_record(0, 1)
PLACES = st.integers(0, 12)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(place: int, epoch: int = 0) -> Key:
    return epoch, place, place


def filled(bound: int, *places: int, size: int = 10) -> RecordRing:
    ring = RecordRing(bound, Clock())
    for place in places:
        ring.put(key(place), RECORD, size)
    return ring


def test_what_no_reader_took_stays_lowest_first() -> None:
    ring = filled(30, 5, 4, 3)
    assert not ring.put(key(6), RECORD, 10)
    assert ring.put(key(1), RECORD, 10)
    assert [place for place in range(8) if key(place) in ring] == [1, 3, 4]
    assert ring.num_bytes == 30
    assert ring.num_dropped == 2


def test_what_was_taken_makes_room_first_and_stays_while_there_is_room() -> None:
    ring = filled(30, 1, 2, 3)
    ring.take(key(1))
    ring.take(key(2))
    assert ring.peek(key(1)) is RECORD
    assert ring.put(key(9), RECORD, 10)
    assert [place for place in range(10) if key(place) in ring] == [2, 3, 9]


def test_what_was_taken_and_is_asked_for_again_is_as_good_as_new() -> None:
    ring = filled(30, 1, 2, 3)
    for place in (1, 2, 3):
        ring.take(key(place))
    ring.want([key(1)])
    for place in (7, 8, 9):
        ring.put(key(place), RECORD, 10)
    assert key(1) in ring


def test_the_lowest_position_a_reader_waits_for_is_always_admitted() -> None:
    ring = filled(30, 1, 2, 3)
    ring.owe(key(9))
    ring.owe(key(5))
    assert ring.owed() == [key(5), key(9)]
    assert ring.put(key(9), RECORD, 25)
    assert ring.put(key(5), RECORD, 500)  # larger than the bound: alone
    assert len(ring) == 1
    ring.take(key(5))
    assert ring.owed() == [key(9)]
    assert ring.put(key(9), RECORD, 25)
    assert ring.num_bytes == 25


def test_a_record_beyond_the_bound_that_nobody_waits_for_is_not_held() -> None:
    ring = filled(30, 1)
    assert not ring.put(key(0), RECORD, 31)
    assert key(1) in ring


def test_a_reader_that_went_away_holds_nothing_for_long() -> None:
    clock = Clock()
    ring = RecordRing(30, clock)
    ring.owe(key(7))
    ring.put(key(7), RECORD, 30)
    assert not ring.put(key(3), RECORD, 10)
    clock.now += OWED_S + 1
    assert ring.put(key(3), RECORD, 10)
    assert ring.owed() == []


def test_what_nobody_asks_for_makes_room_for_later_positions() -> None:
    clock = Clock()
    ring = RecordRing(30, clock)
    for place in (1, 2, 3):
        ring.put(key(place), RECORD, 10)
    clock.now += STALE_S - 1
    ring.want([key(2)])
    clock.now += 2
    assert ring.put(key(8), RECORD, 10)
    assert ring.put(key(9), RECORD, 10)
    assert [place for place in range(10) if key(place) in ring] == [2, 8, 9]


def test_a_released_record_is_gone_unless_it_was_just_asked_for() -> None:
    clock = Clock()
    ring = RecordRing(100, clock)
    for place in range(4):
        ring.put(key(place), RECORD, 10)
    ring.take(key(0))
    clock.now += OWED_S + 1
    ring.want([key(1)])
    ring.release((0, 3))
    assert [place for place in range(4) if key(place) in ring] == [1, 3]
    assert ring.num_bytes == 20


def test_room_counts_what_is_needed_earlier() -> None:
    ring = filled(100, 1, 5, 9)
    ring.take(key(1))
    assert [ring.room(key(place)) for place in (0, 3, 6, 10)] == [100, 100, 90, 80]


CALLS = st.one_of(
    st.tuples(st.just("put"), PLACES, st.integers(1, 40), st.booleans()),
    st.tuples(st.just("owe"), PLACES),
    st.tuples(st.just("want"), PLACES),
    st.tuples(st.just("take"), PLACES),
    st.tuples(st.just("release"), PLACES),
    st.tuples(st.just("pass"), st.integers(1, 150)),
)


@settings(deadline=None)
@given(st.lists(CALLS, max_size=80))
def test_the_bound_holds_and_the_lowest_owed_is_never_dropped(calls: list[tuple[str, int]]) -> None:
    """Against a plain model: what is held, what is owed and until when."""
    clock = Clock()
    ring = RecordRing(30, clock)
    sizes: dict[Key, int] = {}
    owed: dict[Key, float] = {}
    for name, value, *rest in calls:
        own = key(value)
        owed = {k: asked for k, asked in owed.items() if asked >= clock.now - OWED_S}
        before = {k for k in sizes if k in ring}
        match name:
            case "put":
                sizes[own] = sizes[own] if own in ring else rest[0]
                stayed = ring.put(own, RECORD, sizes[own], taken=rest[1])
                assert stayed == (own in ring)
                if owed and own == min(owed):
                    assert stayed
                if owed and min(owed) in before:
                    assert min(owed) in ring
            case "owe":
                ring.owe(own)
                owed[own] = clock.now
            case "want":
                ring.want([own])
            case "take":
                ring.take(own)
                owed.pop(own, None)
                assert (own in before) == (own in ring)
            case "release":
                ring.release((0, value))
                assert all(k in ring for k in before if k >= own)
            case "pass":
                clock.now += value
        held = {k: sizes[k] for k in sizes if k in ring}
        assert sum(held.values()) == ring.num_bytes
        assert ring.num_bytes <= 30 or len(held) == 1
        assert ring.owed() == sorted(k for k, asked in owed.items() if asked >= clock.now - OWED_S and k not in ring)


@pytest.mark.parametrize("seed", range(20))
def test_readers_and_captures_in_any_order_lose_nothing(seed: int) -> None:
    """Readers that wait, and captures that finish in random order, needed or not: every reader gets all of its own."""
    rng = np.random.default_rng(seed)
    num, readers, bound = 60, 2, 25
    ring, sizes, changed = RecordRing(bound), rng.integers(1, 40, num).tolist(), threading.Condition()
    got: list[list[int]] = [[] for _ in range(readers)]

    def read(own: list[int], first: int) -> None:
        for place in range(first, num, readers):
            with changed:
                while ring.peek(key(place)) is None:
                    ring.owe(key(place))
                    changed.wait(1)
                ring.take(key(place))
            own.append(place)

    threads = [threading.Thread(target=read, args=(got[k], k), daemon=True) for k in range(readers)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        with changed:
            needed = [k[1] for k in ring.owed()]
        for place in rng.permutation([*needed, *rng.integers(0, num, 3).tolist()]).tolist():
            with changed:
                ring.put(key(place), RECORD, sizes[place])
                assert ring.num_bytes <= bound or len(ring) == 1
                changed.notify_all()
    assert got == [list(range(k, num, readers)) for k in range(readers)]
