from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.failures import Failure, append_failure, mend_failures, read_failures, set_aside


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


@pytest.mark.parametrize("bit", range(8))
def test_a_damaged_newline_is_not_taken_for_a_torn_line(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "failures.jsonl"
    for row in range(3):
        append_failure(path, failure(row))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(StoreError, match="line 3"):
        read_failures(path)
    mend_failures(path)
    assert path.read_bytes() == content
    assert "1 damaged lines" in str(set_aside(path, tmp_path / "quarantine"))
    assert sorted(read_failures(path)) == [0, 1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    for row in range(3):
        append_failure(path, failure(row))
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"not finite", b"not f1nite")
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(StoreError, match="line 2"):
        read_failures(path)


def test_damaged_lines_are_set_aside_and_sound_ones_kept(tmp_path: Path) -> None:
    path, quarantine = tmp_path / "failures.jsonl", tmp_path / "quarantine"
    for row in range(3):
        append_failure(path, failure(row))
    assert set_aside(path, quarantine) is None
    assert not quarantine.exists()
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [b"rubbish\n", lines[1].replace(b'"row":1', b'"row":7')]
    path.write_bytes(damaged[0] + lines[0] + damaged[1] + lines[2])
    note = set_aside(path, quarantine)
    assert note is not None
    assert "2 damaged lines are in quarantine, 2 sound ones are kept" in note
    assert path.read_bytes() == lines[0] + lines[2]
    assert (quarantine / path.name).read_bytes() == b"".join(damaged)


def test_later_damage_joins_what_was_set_aside_before(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    for text in (b"one\n", b"two\n"):
        path.write_bytes(text)
        set_aside(path, tmp_path / "quarantine")
    assert (tmp_path / "quarantine" / path.name).read_bytes() == b"one\ntwo\n"
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", [b"rubbish", b'{"row":1,"digest":"00"}', b'{"digest":0,"x":"\\ud800"}', b"\xff", b"5"])
def test_a_damaged_line_says_that_repair_mends_it(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "failures.jsonl").write_bytes(line + b"\n")
    with pytest.raises(StoreError, match="run store repair"):
        read_failures(tmp_path / "failures.jsonl")


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a readable"):
        read_failures(tmp_path)
