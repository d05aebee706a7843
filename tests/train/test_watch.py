import threading
import time
from datetime import timedelta

import pytest

from headrace.train import watch
from headrace.train.watch import Watch


class FakeStore:
    """A store in memory; `gone` makes every request fail, without `answers` each waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.answers = threading.Event()
        self.answers.set()

    def _ask(self) -> None:
        self.answers.wait()
        if self.gone:
            raise RuntimeError("connection refused\nat some place")

    def set(self, key: str, value: str, /) -> None:
        self._ask()
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        self._ask()
        return self.values[key]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._ask()
        return [self.values[key] for key in keys]

    def check(self, keys: list[str], /) -> bool:
        self._ask()
        return all(key in self.values for key in keys)

    def set_timeout(self, timeout: timedelta, /) -> None:
        assert timeout.total_seconds() < watch.DEAD_S


class Ranks:
    """Watches of several ranks on one store, at a hundredth of the real times."""

    def __init__(self, size: int) -> None:
        self.store = FakeStore()
        self.ended: dict[int, str] = {}
        self.over = threading.Event()
        self.watches = [Watch(self.store, rank, size, self._end(rank)) for rank in range(size)]
        for one in self.watches:
            one.start()

    def _end(self, rank: int):  # type: ignore[no-untyped-def]
        def end(cause: str) -> None:
            self.ended[rank] = cause
            self.over.set()

        return end

    def stop(self) -> None:
        for one in self.watches:
            one.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_S", 0.02), ("DEAD_S", 1.0), ("GRACE_S", 0.05), ("_PATIENCE_S", 0.5)):
        monkeypatch.setattr(watch, name, seconds)


@pytest.mark.usefixtures("quick")
def test_ranks_that_beat_are_left_alone() -> None:
    ranks = Ranks(3)
    time.sleep(2.5)
    ranks.stop()
    assert ranks.ended == {}
    assert [one.cause for one in ranks.watches] == [None] * 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("silent", "told"), [(2, {0, 1}), (0, {1, 2})])
def test_a_silent_rank_ends_all_others_by_name(silent: int, told: set[int]) -> None:
    ranks = Ranks(3)
    time.sleep(0.2)
    ranks.watches[silent].stop()
    for rank in told:
        assert f"rank {silent} did not answer" in ranks.watches[rank].why("unknown")
    time.sleep(0.5)
    ranks.stop()
    assert set(ranks.ended) == told


@pytest.mark.usefixtures("quick")
def test_a_rank_that_fails_is_heard_by_all() -> None:
    ranks = Ranks(3)
    ranks.watches[1].fail("StoreError: no such record")
    assert [ranks.watches[r].why("unknown") for r in (0, 2)] == ["rank 1 ended: StoreError: no such record"] * 2
    ranks.stop()


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_gone_is_a_cause() -> None:
    ranks = Ranks(2)
    ranks.store.gone = True
    assert "does not answer" in ranks.watches[1].why("unknown")
    assert "at some place" not in ranks.watches[1].why("unknown")
    ranks.watches[0].fail("anything")  # must not raise: there is nobody to tell
    ranks.stop()


@pytest.mark.usefixtures("quick")
def test_a_store_whose_process_is_stopped_is_a_cause() -> None:
    ranks = Ranks(2)
    ranks.store.answers.clear()
    began = time.monotonic()
    assert "meeting point does not answer for" in ranks.watches[1].why("unknown")
    ranks.watches[1].fail("anything")  # must come back: nobody hears it
    assert time.monotonic() - began < 3.0
    ranks.store.answers.set()
    ranks.stop()


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_slow_is_waited_for() -> None:
    ranks = Ranks(2)
    ranks.store.answers.clear()
    time.sleep(0.6)
    ranks.store.answers.set()
    time.sleep(1.0)
    ranks.stop()
    assert ranks.ended == {}


@pytest.mark.usefixtures("quick")
def test_a_main_thread_that_leaves_in_time_is_not_ended() -> None:
    ranks = Ranks(2)
    watch.GRACE_S = 5.0
    ranks.watches[0].fail("x")
    ranks.watches[1].why("unknown")
    ranks.stop()
    assert ranks.ended == {}


def test_a_broken_collective_without_a_cause_keeps_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "DEAD_S", 0.0)
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.05)
    store = FakeStore()
    store.set_timeout = lambda timeout: None  # type: ignore[method-assign]
    assert Watch(store, 0, 2).why("connection reset") == "connection reset"
