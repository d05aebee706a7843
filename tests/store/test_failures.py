from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.failures import Failure, append_failure, mend_failures, read_failures


def failure(row: int, permanent: bool = True, reason: str = "not finite\nat token 3") -> Failure:
    return Failure(row=row, id=bytes(range(16)).hex(), reason=reason, permanent=permanent, generation=1)


def test_the_last_failure_of_a_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    for f in (failure(1, permanent=False), failure(2), failure(1)):
        append_failure(path, f)
    assert read_failures(path) == {1: failure(1), 2: failure(2)}


def test_an_absent_file_has_no_failures(tmp_path: Path) -> None:
    assert read_failures(tmp_path / "absent") == {}
    mend_failures(tmp_path / "absent")


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    append_failure(path, failure(1))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert read_failures(path) == {1: failure(1)}
    mend_failures(path)
    assert path.read_bytes() == whole
    append_failure(path, failure(2))
    assert set(read_failures(path)) == {1, 2}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    for row in range(3):
        append_failure(path, failure(row))
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"not finite", b"not f1nite")
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(StoreError, match="line 2"):
        read_failures(path)
