import os
import threading
import time

import pytest

from headrace.errors import StoreError
from headrace.store.lease import Lease
from headrace.store.objects import Objects


@pytest.fixture
def objects() -> Objects:
    return Objects(f"memory://leases/{os.urandom(4).hex()}")


def test_generations_grow_and_start_where_asked(objects: Objects) -> None:
    for wanted, at_least in [(1, 1), (2, 1), (7, 7), (8, 3)]:
        lease = Lease(objects, "me", 5.0)
        assert lease.claim(at_least) == wanted
        lease.release()
        lease.release()


def test_one_that_is_alive_is_not_passed_over(objects: Objects) -> None:
    held = Lease(objects, "one", 0.4)
    held.claim(1)
    with pytest.raises(StoreError, match=f"held by process {os.getpid()} on .*alive"):
        Lease(objects, "two", 0.4).claim(1)
    held.release()
    free = Lease(objects, "two", 60.0)
    began = time.monotonic()
    assert free.claim(1) == 2
    assert time.monotonic() - began < 5  # given up, so nobody waits
    free.release()


def test_one_that_nobody_renews_is_passed_over_in_its_time(objects: Objects, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Lease, "_renew", lambda self: None)  # as in a process that is killed or stopped
    Lease(objects, "one", 0.5).claim(1)
    began = time.monotonic()
    assert Lease(objects, "two", 0.5).claim(1) == 2
    assert time.monotonic() - began >= 0.5
    assert "waiting at most 0.5 s for a sign of life" in caplog.text


def test_ones_own_earlier_lease_costs_no_time(objects: Objects, monkeypatch) -> None:
    monkeypatch.setattr(Lease, "_renew", lambda self: None)
    Lease(objects, "me", 60.0).claim(1)
    began = time.monotonic()
    assert Lease(objects, "me", 60.0).claim(1) == 2
    assert time.monotonic() - began < 5


def test_of_two_that_begin_together_one_is_refused(objects: Objects) -> None:
    both, results = threading.Barrier(2), []

    def begin(owner: str) -> None:
        both.wait()
        try:
            results.append(Lease(objects, owner, 30.0).claim(1))
        except StoreError as exc:
            results.append(exc.args[1])

    real = Objects.create
    meet = threading.Barrier(2)

    def create(self: Objects, key: str, content: bytes) -> bool:
        meet.wait(10)  # both have looked, neither has claimed
        return real(self, key, content)

    Objects.create = create  # type: ignore[method-assign]
    try:
        threads = [threading.Thread(target=begin, args=(owner,)) for owner in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        Objects.create = real  # type: ignore[method-assign]
    assert sorted(map(str, results)) == ["1", "it is held by another writer that began just now"]


def test_a_lease_that_cannot_be_renewed_is_told(objects: Objects, monkeypatch, caplog) -> None:
    def replace(self: Objects, key: str, content: bytes) -> None:
        raise StoreError("an answer", "none", "wait")

    monkeypatch.setattr(Objects, "replace", replace)
    lease = Lease(objects, "me", 0.2)
    lease.claim(1)
    time.sleep(0.3)
    lease.release()
    assert "could not be renewed: none" in caplog.text
    assert "was not released" in caplog.text
