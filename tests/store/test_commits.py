import os

import pytest

from headrace.errors import StoreError
from headrace.store import commits
from headrace.store.commits import ADD, FULL, OPEN, Commit, CommitLog, LostLease
from headrace.store.objects import Objects
from headrace.testing.states import fake_manifest
from tests.store.conftest import S3

TEXT = fake_manifest().to_text().encode()


@pytest.fixture
def objects() -> Objects:
    return Objects(f"memory://commits/{os.urandom(4).hex()}")


def begun(objects: Objects, generation: int = 1) -> CommitLog:
    log = CommitLog(objects)
    log.begin(generation, TEXT)
    return log


def test_a_commit_comes_back_as_it_was() -> None:
    commit = Commit(7, ADD, 3, os.urandom(16), TEXT, b"blocks", b"lines")
    assert Commit.from_bytes(commit.to_bytes(), 7, "here") == commit


def test_every_flip_in_a_commit_is_noticed() -> None:
    content = Commit(7, ADD, 3, os.urandom(16), b"{}", b"blocks", b"lines").to_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        with pytest.raises(StoreError, match="here"):
            Commit.from_bytes(bytes(flipped), 7, "here")
    with pytest.raises(StoreError, match="as commit 8"):
        Commit.from_bytes(content, 8, "here")
    for length in (0, 10, len(content) - 1):
        with pytest.raises(StoreError):
            Commit.from_bytes(content[:length], 7, "here")


def test_no_commits_are_no_store(objects: Objects) -> None:
    assert CommitLog(objects).read() is None


def test_commits_add_up_in_order(objects: Objects) -> None:
    log = begun(objects)
    log.append(ADD, 1, blocks=b"one", failed=b"x\n")
    log.append(ADD, 1, blocks=b"two")
    state = CommitLog(objects).read()
    assert state is not None
    assert (state.blocks, state.failed, state.last, state.generation) == (b"onetwo", b"x\n", 2, 1)
    assert state.stored_manifest("here") == fake_manifest(provenance=state.stored_manifest("here").provenance)
    assert state.removable == (1, 2)


def test_a_full_commit_replaces_all_but_opening_ones(objects: Objects) -> None:
    log = begun(objects)
    store = CommitLog(objects).read()
    for k in range(5):
        log.append(ADD, 1, blocks=b"%d" % k)
    log.replace(1, TEXT, b"all", b"")
    log.append(ADD, 1, blocks=b"+")
    assert sorted(objects.sizes("commits")) == [f"commits/{n:010d}" for n in (0, 6, 7)]
    state = CommitLog(objects).read()
    assert state is not None
    assert store is not None
    assert (state.blocks, state.last, state.store) == (b"all+", 7, store.store)
    log = begun(objects, 2)
    log.replace(2, TEXT, b"less", b"")
    assert sorted(objects.sizes("commits")) == [f"commits/{n:010d}" for n in (0, 8, 9)]


def test_whoever_slept_while_another_one_began_commits_nothing(objects: Objects) -> None:
    asleep = begun(objects)
    asleep.append(ADD, 1, blocks=b"mine")
    awake = begun(objects, 2)
    for _ in range(3):  # also after the new writer has compacted away what stood at the sleeper's number
        with pytest.raises(LostLease, match="the only writer"):
            asleep.append(ADD, 1, blocks=b"late")
        awake.append(ADD, 2, blocks=b"new")
        awake.replace(2, TEXT, b"all", b"")
    with pytest.raises(LostLease):
        asleep.replace(1, TEXT, b"late", b"")
    state = CommitLog(objects).read()
    assert state is not None
    assert state.blocks == b"all"


def test_one_that_claimed_before_a_later_writer_began_does_not_begin(objects: Objects) -> None:
    begun(objects, 3)
    with pytest.raises(LostLease):
        begun(objects, 2)


def test_beginning_goes_behind_a_commit_that_comes_meanwhile(objects: Objects, monkeypatch) -> None:
    old = begun(objects)
    real, late = CommitLog.append, [b"late"]

    def append(self: CommitLog, kind: int, *args, **more) -> None:
        if kind == OPEN and late:
            real(old, ADD, 1, blocks=late.pop())
        real(self, kind, *args, **more)

    monkeypatch.setattr(CommitLog, "append", append)
    state = CommitLog(objects).begin(2, TEXT)
    assert (state.blocks, state.generation, state.last) == (b"late", 2, 2)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_commit_that_is_gone_is_named(objects: Objects, gone: int) -> None:
    log = begun(objects)
    for k in range(3):
        log.append(ADD, 1, blocks=b"%d" % k)
    objects.remove([f"commits/{gone:010d}"])
    with pytest.raises(StoreError, match=f"no commits/{gone:010d}"):
        CommitLog(objects).read()


def test_a_reader_that_meets_a_compaction_reads_again(objects: Objects, monkeypatch) -> None:
    log = begun(objects)
    for k in range(3):
        log.append(ADD, 1, blocks=b"%d" % k)
    real = Objects.get_all

    def get_all(self: Objects, keys: list[str]) -> list[bytes]:
        monkeypatch.setattr(Objects, "get_all", real)
        log.replace(1, TEXT, b"all", b"")
        return real(self, keys)

    monkeypatch.setattr(Objects, "get_all", get_all)
    state = CommitLog(objects).read()
    assert state is not None
    assert state.blocks == b"all"


def test_only_what_is_after_the_last_full_commit_is_fetched(objects: Objects, monkeypatch) -> None:
    monkeypatch.setattr(commits, "IN_FLIGHT", 2)
    log = begun(objects)
    for _ in range(3):
        for k in range(4):
            log.append(ADD, 1, blocks=b"%d" % k)
        log.append(FULL, 1, TEXT, b"full")
    fetched: list[str] = []
    real = Objects.get_all
    monkeypatch.setattr(Objects, "get_all", lambda self, keys: fetched.extend(keys) or real(self, keys))
    state = CommitLog(objects).read()
    assert state is not None
    assert state.blocks == b"full"
    assert sorted(fetched) == [f"commits/{n:010d}" for n in (0, 14, 15)]


def test_a_commit_is_made_once_by_a_real_server(s3: S3) -> None:
    objects = Objects(s3.address())
    one, two = begun(objects), CommitLog(objects)
    two.read()
    one.append(ADD, 1, blocks=b"one")
    with pytest.raises(LostLease):
        two.append(ADD, 1, blocks=b"two")
