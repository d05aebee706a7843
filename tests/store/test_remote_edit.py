from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.commits import CommitLog, LostLease
from headrace.store.objects import Objects
from headrace.store.remote import open_reader
from headrace.store.remote_edit import RemoteEditor
from headrace.store.remote_verify import verify_objects
from headrace.store.remote_writer import RemoteWriter
from headrace.store.shard import shard_name
from headrace.testing.states import fake_manifest, fake_record
from tests.store.conftest import S3
from tests.store.test_remote import write


@pytest.fixture
def address(s3: S3, tmp_path: Path) -> str:
    """A store of rows 0 to 5 in three shards, in this process's memory."""
    return write(s3.address().replace("s3://", "memory://"), tmp_path / "staging")


def shards(address: str) -> set[str]:
    return {key.removeprefix("shards/") for key in Objects(address).sizes("shards")}


def swap(editor: RemoteEditor, number: int, row: int, for_good: bool = True) -> None:
    """Leave one row of a shard out."""
    listed = editor.listed()[1, number]
    editor.fetch((1, number), listed.num_bytes)
    editor.take_out((1, number), listed.rows[listed.rows["row"] != row])
    editor.commit(for_good)


def test_shards_are_listed_with_what_counts_of_them(address: str, tmp_path: Path) -> None:
    with RemoteEditor(address, tmp_path / "edit") as editor:
        found = editor.listed()
        assert {key: (sorted(set(s.rows["row"].tolist())), s.num_rows) for key, s in found.items()} == {
            (1, 0): ([0, 1], 4),
            (1, 1): ([2, 3], 4),
            (1, 2): ([4, 5], 2),
        }
        assert [s.num_bytes for s in found.values()] == list(Objects(address).sizes("shards").values())
    assert len(editor.before) == 10


def test_what_is_taken_out_goes_only_with_a_commit(address: str, tmp_path: Path) -> None:
    before = shards(address)
    with RemoteEditor(address, tmp_path / "edit") as editor:
        listed = editor.listed()[1, 0]
        editor.fetch((1, 0), listed.num_bytes)
        assert editor.take_out((1, 0), listed.rows[:3]) == (2, 0)
        assert editor.take_out((1, 2), listed.rows[:0]) is None
        assert shards(address) == before | {shard_name(2, 0)}
        assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]
        editor.commit(for_good=True)
        assert shards(address) == {shard_name(2, 0), shard_name(1, 1)}
        assert open_reader(address).rows.tolist() == [0, 2, 3]
    assert open_reader(address).rows.tolist() == [0, 2, 3]
    assert verify_objects(address) == []
    assert open_reader(address).failures.keys() == {99}


def test_what_was_not_committed_is_cleared_by_the_next_writer(address: str, tmp_path: Path) -> None:
    before = shards(address)
    with RemoteEditor(address, tmp_path / "edit") as editor:
        listed = editor.listed()[1, 0]
        editor.fetch((1, 0), listed.num_bytes)
        editor.take_out((1, 0), listed.rows[:3])
    with RemoteEditor(address, tmp_path / "again") as editor:
        assert editor.notes == ["1 shards were uploaded and never committed; they are removed"]
    assert shards(address) == before
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("refused", ["commits", "shards"])
def test_shards_go_only_after_the_commit_and_by_the_next_writer_at_the_latest(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    before, real = shards(address), Objects.remove

    def create(self: Objects, key: str, content: bytes) -> bool:
        raise StoreError("an answer", f"none for {key}", "wait")

    def remove(self: Objects, keys: Iterable[str]) -> None:
        own = list(keys)
        if any(key.startswith(refused) for key in own):
            raise StoreError("an answer", f"none for {own}", "wait")
        real(self, own)

    with monkeypatch.context() as patch, RemoteEditor(address, tmp_path / "edit") as editor:
        patch.setattr(Objects, *(("remove", remove) if refused == "shards" else ("create", create)))
        listed = editor.listed()[1, 0].rows
        editor.take_out((1, 0), listed[:0])
        with pytest.raises(StoreError, match=f"none for .*{refused}"):
            editor.commit(for_good=True)
        with pytest.raises(StoreError, match="an open writer"):
            editor.commit(for_good=True)
    assert before <= shards(address)
    RemoteWriter(address, tmp_path / "next", fake_manifest(), 1 << 30, 1e9).close()
    assert shards(address) == before - ({shard_name(1, 0)} if refused == "shards" else set())
    assert open_reader(address).rows.tolist() == ([2, 3, 4, 5] if refused == "shards" else [0, 1, 2, 3, 4, 5])
    assert verify_objects(address) == []


def test_one_that_slept_through_its_lease_changes_nothing(address: str, tmp_path: Path) -> None:
    with RemoteEditor(address, tmp_path / "asleep", lease_seconds=1000) as editor:  # first renewed after 250 s
        with RemoteWriter(address, tmp_path / "awake", fake_manifest(), 1 << 30, 1e9, lease_seconds=0.2) as writer:
            writer.add(fake_record(6, writer.generation))
        with pytest.raises(LostLease):
            swap(editor, 0, row=1)
    assert {shard_name(1, 0), shard_name(1, 1), shard_name(1, 2), shard_name(3, 0)} <= shards(address)
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert verify_objects(address) == []


def test_a_living_writer_keeps_it_out(address: str, tmp_path: Path) -> None:
    with (
        RemoteWriter(address, tmp_path / "alive", fake_manifest(), 1 << 30, 1e9, lease_seconds=0.4),
        pytest.raises(StoreError, match="which is alive"),
    ):
        RemoteEditor(address, tmp_path / "edit", lease_seconds=0.4)


@pytest.mark.parametrize("for_good", [True, False])
def test_a_copy_that_a_killed_capture_left_brings_back_only_what_was_not_removed_for_good(
    address: str, tmp_path: Path, for_good: bool
) -> None:
    staged = tmp_path / "staging" / "shards" / shard_name(1, 0)
    copy = Objects(address).get(f"shards/{staged.name}")
    with RemoteEditor(address, tmp_path / "edit") as editor:
        swap(editor, 0, row=1, for_good=for_good)
    for _ in range(2):
        RemoteWriter(address, tmp_path / "other", fake_manifest(), 1 << 30, 1e9).close()
    staged.write_bytes(copy)  # as a kill between commit and removal leaves it
    with RemoteWriter(address, tmp_path / "staging", fake_manifest(), 1 << 30, 1e9) as writer:
        assert (1 in writer.committed) is not for_good
    assert not staged.exists()
    assert open_reader(address).rows.tolist() == ([0, 2, 3, 4, 5] if for_good else [0, 1, 2, 3, 4, 5])
    assert (staged.name in shards(address)) is not for_good
    assert verify_objects(address) == []


def test_many_commits_become_one(address: str, tmp_path: Path) -> None:
    with RemoteEditor(address, tmp_path / "edit") as editor:
        assert editor.compact() == 4
        assert editor.compact() == 0
    state = CommitLog(Objects(address)).read()
    assert state is not None
    assert state.removable == (state.last,)
    assert open_reader(address).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_copy_lies_in_quarantine_with_its_reasons(address: str, tmp_path: Path) -> None:
    objects = Objects(address)
    with RemoteEditor(address, tmp_path / "edit") as editor:
        editor.set_aside((1, 1), b"[]\n")
    name = shard_name(1, 1)
    assert objects.get(f"quarantine/{name}") == objects.get(f"shards/{name}")
    assert objects.get(f"quarantine/{name}.json") == b"[]\n"


def test_a_shard_that_goes_while_it_is_fetched_is_an_error(address: str, tmp_path: Path) -> None:
    with RemoteEditor(address, tmp_path / "edit") as editor:
        Objects(address).remove([f"shards/{shard_name(1, 1)}"])
        with pytest.raises(StoreError, match="it is gone"):
            editor.fetch((1, 1), 5928)


def test_there_is_nothing_to_edit_where_no_store_is(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a store at"):
        RemoteEditor(s3.address().replace("s3://", "memory://"), tmp_path / "edit")
