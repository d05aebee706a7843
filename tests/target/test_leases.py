import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import StoreError, TargetError
from headrace.kinds import EngineConfig
from headrace.target.channel import DeliveryError, DeliveryRefused
from headrace.target.endpoints import Answer, Endpoint, Request
from headrace.target.leases import Leases
from headrace.testing.fake_engine import FakeEngine
from tests.engines import EngineProcess, fake_endpoint, ids

QUICK = EngineConfig(in_flight=3, timeout_s=10, retries=3, set_aside_s=0.3)


def numbered(count: int) -> Iterator[tuple[int, Request]]:
    yield from ((n, Request(ids(4 + n % 5, n))) for n in range(count))


def size(_: int, answer: Answer) -> int:
    assert answer.delivery is not None
    return answer.delivery.num_tokens


@pytest.fixture
def two(folders: dict[str, Path], tmp_path: Path) -> Iterator[list[tuple[FakeEngine, Endpoint]]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(fake_endpoint(tmp_path / name, folders["llama"])) for name in "ab"]


def leases(two: list[tuple[FakeEngine, Endpoint]], make: Any = size, **changes: Any) -> Leases[int]:
    return Leases([endpoint for _, endpoint in two], QUICK.model_copy(update=changes), make)


def test_every_request_ends_once_over_all_servers(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    work = leases(two)
    outcomes = list(work.run(numbered(40)))
    assert sorted(outcome.number for outcome in outcomes) == list(range(40))
    assert all(outcome.made == 4 + outcome.number % 5 for outcome in outcomes)
    figures = work.figures
    assert sum(one.num_requests for one in figures.values()) == 40
    assert sum(one.num_tokens for one in figures.values()) == sum(4 + n % 5 for n in range(40))
    assert all(one.num_requests and one.tokens_s > 0 and one.in_flight == 0 for one in figures.values())
    assert list(leases(two).run(())) == []


def test_a_server_never_works_on_more_than_its_bound(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    running: collections.Counter[str] = collections.Counter()
    most: collections.Counter[str] = collections.Counter()
    turn = threading.Lock()
    for _, endpoint in two:
        asked = endpoint.ask

        def counted(request: Request, name: str = endpoint.name, asked: Any = asked) -> Answer:
            with turn:
                running[name] += 1
                most[name] = max(most[name], running[name])
            time.sleep(0.01)
            try:
                answer: Answer = asked(request)
                return answer
            finally:
                with turn:
                    running[name] -= 1

        endpoint.ask = counted  # type: ignore[method-assign]
    assert len(list(leases(two).run(numbered(40)))) == 40
    assert most == {"a": 3, "b": 3}


def test_requests_are_drawn_only_as_servers_become_free(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    drawn = 0

    def counted() -> Iterator[tuple[int, Request]]:
        nonlocal drawn
        for one in numbered(10_000):
            drawn += 1
            yield one

    outcomes = leases(two).run(counted())
    next(outcomes)
    time.sleep(0.5)
    assert drawn <= 2 * 2 * 3 + 3, "in flight, ended and not taken yet, looked at"
    outcomes.close()  # type: ignore[attr-defined]
    before = drawn
    time.sleep(0.3)
    assert drawn <= before + 6


@pytest.mark.parametrize("fault", ["errors_500", "queue_full"])
def test_what_fails_in_passing_is_tried_again(two: list[tuple[FakeEngine, Endpoint]], fault: str) -> None:
    two[0][0].fault, two[0][0].times = fault, 4
    work = leases(two)
    outcomes = list(work.run(numbered(20)))
    assert sorted(outcome.number for outcome in outcomes) == list(range(20))
    assert all(outcome.error is None for outcome in outcomes)
    assert work.figures["a"].num_retries == 4
    assert work.figures["a"].num_failures == 0


def test_what_will_not_pass_is_tried_once(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    tried = collections.Counter[int]()

    def make(number: int, answer: Answer) -> int:
        tried[number] += 1
        if number == 3:
            raise DeliveryRefused("states", "NaN", "")
        if number == 5:
            raise DeliveryError("states", "too late", "")
        return size(number, answer)

    outcomes = {outcome.number: outcome for outcome in leases(two, make, retries=1).run(numbered(8))}
    assert str(outcomes[3].error.args[1]) == "NaN"  # type: ignore[union-attr]
    assert str(outcomes[5].error.args[1]) == "too late"  # type: ignore[union-attr]
    assert sorted(n for n, one in outcomes.items() if one.error is None) == [0, 1, 2, 4, 6, 7]
    assert tried == {**dict.fromkeys(range(8), 1), 5: 2}


def test_an_error_that_nobody_foresaw_is_raised_and_hangs_nothing(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    def broken(number: int, answer: Answer) -> int:
        if number == 3:
            raise StoreError("room", "none", "make some")
        return size(number, answer)

    with pytest.raises(StoreError, match="make some"):
        list(leases(two, broken).run(numbered(20)))


def test_a_server_that_keeps_failing_is_set_aside_and_asked_again(two: list[tuple[FakeEngine, Endpoint]]) -> None:
    sick = two[0][0]
    sick.fault = "errors_500"
    work = leases(two, retries=20)
    done = 0
    for _ in work.run(numbered(300)):
        done += 1
        if done == 60:
            assert work.figures["a"].num_requests == 0
            sick.fault = ""
    assert done == 300
    assert work.figures["a"].num_set_aside >= 1
    assert work.figures["a"].num_requests > 0, "asked again later"


def test_a_server_that_hangs_holds_up_no_other(two: list[tuple[FakeEngine, Endpoint]], tmp_path: Path) -> None:
    two[0][0].fault, two[0][0].times = "hang", 3
    two[0] = (two[0][0], Endpoint(tmp_path / "a", 0.5))
    outcomes = list(leases(two).run(numbered(30)))
    assert sorted(one.number for one in outcomes) == list(range(30))
    assert all(one.error is None for one in outcomes)


def test_a_killed_server_loses_no_sample_and_comes_back(
    folders: dict[str, Path], two: list[tuple[FakeEngine, Endpoint]], tmp_path: Path
) -> None:
    child = EngineProcess(tmp_path / "c", folders["llama"])
    try:
        child.wait_until_healthy()
        slow = two[0][0]
        slow.fault = "slow"
        work = Leases([two[0][1], Endpoint(tmp_path / "c", 10)], QUICK, size)
        seen = collections.Counter[int]()
        for outcome in work.run(numbered(200)):
            assert outcome.error is None
            seen[outcome.number] += 1
            if len(seen) == 30:
                child.kill()
            if len(seen) == 36:  # the slow one alone
                before = work.figures["c"].num_requests
                child.start()
                child.wait_until_healthy()
                slow.fault = ""
        assert seen == dict.fromkeys(range(200), 1)
        assert work.figures["c"].num_set_aside == 1
        assert work.figures["c"].num_requests > before
    finally:
        child.kill()


def test_the_run_ends_within_seconds_when_every_server_has_gone(folders: dict[str, Path], tmp_path: Path) -> None:
    children = [EngineProcess(tmp_path / name, folders["llama"]) for name in "ab"]
    try:
        for child in children:
            child.wait_until_healthy()
        endpoints = [Endpoint(child.folder, 10) for child in children]
        outcomes = Leases(endpoints, QUICK.model_copy(update={"set_aside_s": 60.0}), size).run(numbered(100_000))
        next(outcomes)
        (tmp_path / "a" / "log").write_text("out of memory\n")
        for child in children:
            child.kill()
        began = time.monotonic()
        with pytest.raises(TargetError, match=r"(?s)an engine that answers.*a: .*out of memory.*b: .*goes on from"):
            collections.deque(outcomes, maxlen=0)
        assert time.monotonic() - began < 5
    finally:
        for child in children:
            child.kill()


def test_servers_that_are_not_there_are_told_at_once(folders: dict[str, Path], tmp_path: Path) -> None:
    with fake_endpoint(tmp_path / "a", folders["llama"]) as (_, endpoint):
        pass
    with pytest.raises(TargetError, match=r"(?s)an engine that answers, found none:\na: .*headrace engine --launch"):
        Leases([endpoint], QUICK, size)
