import os
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.append import AppendFile, make_durable_folder


def test_bytes_go_to_the_end_of_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    file = AppendFile(path)
    assert file.num_bytes == 3
    file.write(b"new")
    file.sync()
    file.close()
    assert path.read_bytes() == b"oldnew"
    assert file.num_bytes == 6


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:3]))
    file = AppendFile(tmp_path / "a")
    file.write(b"0123456789")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize(("call", "act"), [("write", lambda f: f.write(b"x")), ("fsync", lambda f: f.sync())])
def test_a_sick_disk_is_a_store_error_that_names_the_file(tmp_path, monkeypatch, call, act) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    file = AppendFile(tmp_path / "a")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match="No space left"):
        act(file)
    file.close()


def test_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a")
    file.close()
    file.close()
    with pytest.raises(StoreError, match="closed"):
        file.write(b"x")


def test_a_folder_that_is_missing_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="opened"):
        AppendFile(tmp_path / "absent" / "a")


def test_truncate_forgets_the_end(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a")
    file.write(b"abcdef")
    file.truncate(2)
    file.write(b"Z")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"abZ"


def test_a_folder_is_made_durable_up_to_the_first_one_that_was_there(tmp_path, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr("headrace.store.append.fsync_folder", synced.append)
    make_durable_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)
    make_durable_folder(tmp_path / "a" / "b" / "c")
