import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StoreError
from headrace.store.journal import (
    HEADER,
    ROW_BYTES,
    append_journal,
    journal_rows,
    read_journal,
    rewrite_journal,
    scan_journal,
)
from headrace.store.shard import INDEX_DTYPE, Rows


def rows(*numbers: int, generation: int = 1) -> Rows:
    index = np.zeros(len(numbers), INDEX_DTYPE)
    index["row"] = numbers
    index["id"] = [np.void(n.to_bytes(16, "big")) for n in numbers]
    index["num_segments"] = 1
    return journal_rows(index, generation, 7)


def test_rows_are_packed_and_the_header_is_aligned() -> None:
    assert (len(HEADER), ROW_BYTES) == (16, 104)


def test_appended_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(3, 1))
    append_journal(path, rows(2))
    found = read_journal(path)
    assert found["row"].tolist() == [3, 1, 2]
    assert found["shard_number"].tolist() == [7, 7, 7]


def test_an_absent_journal_is_empty(tmp_path: Path) -> None:
    assert len(read_journal(tmp_path / "absent")) == 0


def test_a_torn_end_is_left_out_whatever_its_length(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2, 3))
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        assert len(read_journal(path)) == max(0, size - len(HEADER)) // ROW_BYTES


def test_a_tail_of_zeros_is_torn_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2))
    path.write_bytes(path.read_bytes() + bytes(3 * ROW_BYTES + 5))
    assert read_journal(path)["row"].tolist() == [1, 2]


def test_every_flip_is_noticed_and_its_offset_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2, 3))
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        at = 0 if position < len(HEADER) else len(HEADER) + (position - len(HEADER)) // ROW_BYTES * ROW_BYTES
        with pytest.raises(StoreError, match=f"damaged at offset {at}$|damaged at offset {at}\n"):
            read_journal(path)


def test_a_scan_tells_good_rows_from_bad(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2, 3))
    flipped = bytearray(path.read_bytes())
    flipped[len(HEADER) + ROW_BYTES + 9] ^= 1
    path.write_bytes(flipped)
    assert scan_journal(path)[1].tolist() == [True, False, True]


def test_a_rewritten_journal_holds_only_the_new_rows(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2, 3))
    rewrite_journal(path, read_journal(path)[1:])
    append_journal(path, rows(9))
    assert read_journal(path)["row"].tolist() == [2, 3, 9]


def test_a_rewrite_that_fails_leaves_the_old_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    append_journal(path, rows(1, 2))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        rewrite_journal(path, rows(9))
    assert read_journal(path)["row"].tolist() == [1, 2]
