"""Disks that fill up, fail, refuse or go away under a writer: a clear error, and what was committed intact."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.queue import RecordQueue
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def open_writer(root: Path) -> StoreWriter:
    return StoreWriter(root, fake_manifest(), 1 << 30, 1e9)


def add_and_seal(writer: StoreWriter) -> None:
    writer.add(fake_record(2, 1))
    writer.seal()


STEPS: dict[str, Callable[[StoreWriter], None]] = {
    "record": add_and_seal,
    "failure": lambda writer: writer.fail(fake_sample(9).id, 9, "not finite", permanent=True),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_what_was_committed_is_intact_and_the_next_writer_goes_on(tmp_path, monkeypatch, step, call, code) -> None:
    writer = open_writer(tmp_path)
    for row in range(2):
        writer.add(fake_record(row, 1))
    writer.seal()

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=os.strerror(code)) as caught:
            STEPS[step](writer)
    assert "hint" in str(caught.value)
    with pytest.raises(StoreError, match="a write failed"):
        writer.add(fake_record(3, 1))
    writer.close()
    reader = StoreReader(tmp_path)
    assert all(same_records(reader.read(row, fake_sample(row).id), fake_record(row, 1)) for row in range(2))
    with open_writer(tmp_path) as writer:
        assert {0, 1} <= set(writer.committed)
        for row in {0, 1, 2, 3} - set(writer.committed):
            writer.add(fake_record(row, writer.generation))
    assert StoreReader(tmp_path).rows.tolist() == [0, 1, 2, 3]
    assert verify(tmp_path) == []


def test_a_half_written_message_on_a_full_disk_is_no_record(tmp_path, monkeypatch) -> None:
    writer = open_writer(tmp_path)
    writer.add(fake_record(0, 1))
    real = os.write
    calls = [0]

    def filling(descriptor: int, content: bytes) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, bytes(content)[:100])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(StoreError, match="No space left"):
            writer.add(fake_record(1, 1))
    writer.close()
    with open_writer(tmp_path) as writer:
        assert set(writer.committed) == {0}
    assert verify(tmp_path) == []


def test_a_folder_that_vanishes_is_a_clear_error(tmp_path: Path) -> None:
    root = tmp_path / "states"
    writer = open_writer(root)
    writer.add(fake_record(0, 1))
    shutil.rmtree(root)
    with pytest.raises(StoreError, match=r"states"):
        writer.seal()
    writer.close()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest)  # type: ignore[arg-type]

    open_writer(tmp_path / "states").close()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        open_writer(tmp_path / "states")


def fill(queue: RecordQueue) -> None:
    for row in range(50):
        queue.add(fake_record(row, 1))


def test_a_failing_disk_reaches_the_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = open_writer(tmp_path)
    queue = RecordQueue(writer, 3_000)
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StoreError, match="No space left"):
        fill(queue)
    with pytest.raises(StoreError, match="No space left"):
        queue.close()
    writer.close()
