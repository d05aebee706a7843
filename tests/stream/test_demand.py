import numpy as np

from headrace.config import OrderConfig
from headrace.order import epoch_order
from headrace.source import Position
from headrace.stream.demand import MOST_ASKED, Demand
from headrace.stream.ring import STALE_S

LENGTHS = np.array([5, 9, 3, 7, 5, 8, 2, 6, 4, 1])
ELIGIBLE = np.array([row != 4 for row in range(10)])
ORDER = OrderConfig(window_samples=5, seed=3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def demand(ahead: int = 3, clock: Clock | None = None, own: np.ndarray | None = None) -> Demand:
    return Demand(LENGTHS, ELIGIBLE, ORDER, 20, 2, ahead, own, clock or Clock())


def rows(epoch: int) -> list[int]:
    return epoch_order(ELIGIBLE, 5, 3, epoch).tolist()


def key(epoch: int, place: int) -> tuple[int, int, int]:
    return epoch, place, rows(epoch)[place]


def test_what_was_asked_for_is_needed_lowest_first_then_what_follows() -> None:
    own = demand()
    own.ask([key(0, 5), key(0, 2)])
    assert list(own.pending()) == [key(0, 2), key(0, 5), key(0, 3), key(0, 4), key(0, 5)]
    own.ask([key(0, 7)])
    assert list(own.pending())[3:] == [key(0, 8), key(1, 0), key(1, 1)]


def test_the_last_epoch_ends_what_follows() -> None:
    own = demand()
    own.ask([key(1, 8)])
    assert list(own.pending()) == [key(1, 8)]


def test_nothing_follows_without_ahead() -> None:
    own = demand(ahead=0)
    own.ask([key(0, 1)])
    assert list(own.pending()) == [key(0, 1)]


def test_what_other_servers_have_is_in_no_group_and_never_follows() -> None:
    mine = np.arange(10) % 2 == 0
    own = demand(ahead=9, own=mine)
    assert sorted(row for group in own.groups for row in group.rows) == [0, 2, 4, 6, 8]
    assert [own.group(row) for row in (1, 3)] == [-1, -1]
    first = next(place for place in range(9) if mine[rows(0)[place]])
    own.ask([key(0, first)])
    assert {row for _, _, row in own.pending()} <= {0, 2, 4, 6, 8}


def test_a_position_of_another_order_is_held_by_its_row() -> None:
    own = demand()
    place = rows(0).index(7)
    assert own.key(Position(0, place, 7, b"")) == (0, place, 7)
    assert own.key(Position(0, place + 1, 7, b"")) == (0, -1, 7)
    assert own.key(Position(0, -1, 4, b"")) == (0, -1, 4)


def test_members_of_a_group_are_needed_at_their_place_until_a_reader_had_them() -> None:
    own = demand()
    place = rows(1).index(8)
    assert own.keys_of(8, 1, (0, 0)) == {(1, place, 8)}
    own.taken((1, place, 8))
    assert own.passed((1, place, 8))
    assert own.keys_of(8, 1, (0, 0)) == set()
    own.ask([(1, place, 8), (0, -1, 8)])  # a rollback, and a reader that goes by row
    assert own.asked((1, place, 8))
    assert own.keys_of(8, 1, (0, 0)) == {(1, place, 8), (0, -1, 8)}
    assert own.keys_of(9, 0, (1, 0)) == set()  # released
    assert own.keys_of(4, 0, (0, 0)) == set()  # held out: it has no place


def test_a_rollback_makes_all_that_follows_needed_again() -> None:
    own = demand()
    for epoch in range(2):
        for place in range(9):
            own.taken(key(epoch, place))
    own.ask([key(0, 4)])
    assert [own.passed(key(0, place)) for place in range(9)] == [True] * 4 + [False] * 5
    assert not any(own.passed(key(1, place)) for place in range(9))


def test_a_hint_that_nobody_repeats_is_forgotten() -> None:
    clock = Clock()
    own = demand(0, clock)
    own.ask([key(0, 1)])
    clock.now += STALE_S - 1
    own.ask([key(0, 6)])
    clock.now += 2
    assert list(own.pending()) == [key(0, 6)]


def test_what_is_released_is_not_pending() -> None:
    own = demand(0)
    own.ask([key(0, 1), key(0, 6)])
    own.release((0, 4))
    assert list(own.pending()) == [key(0, 6)]


def test_hints_are_bounded() -> None:
    own = demand(0)
    own.ask([(0, -1, 0)] * 2 + [(epoch, -1, 1) for epoch in range(MOST_ASKED + 100)])
    own.ask([(7, -1, 2)])
    assert len(list(own.pending())) <= MOST_ASKED + 1
