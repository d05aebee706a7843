import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StoreError
from headrace.store.journal import (
    BLOCK_DTYPE,
    HEADER,
    ROW_BYTES,
    append_journal,
    index_rows,
    journal_rows,
    read_journal,
    rewrite_journal,
    scan_journal,
    size,
)
from headrace.store.shard import INDEX_DTYPE, Rows


def index(*numbers: int) -> Rows:
    rows = np.zeros(len(numbers), INDEX_DTYPE)
    rows["row"] = numbers
    rows["id"] = [np.void(n.to_bytes(16, "big")) for n in numbers]
    rows["digest"] = [np.void((n * 7**20 % 2**128).to_bytes(16, "big")) for n in numbers]
    rows["offset"] = np.arange(len(numbers))
    rows["num_segments"] = 1
    return rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of three shards with one, two and three rows."""
    for number in range(3):
        append_journal(tmp_path / "j", index(*range(10 * number + 1, 11 * number + 2)), 4, number)
    return tmp_path / "j"


def block_starts(path: Path) -> list[int]:
    starts = [len(HEADER)]
    for rows in (1, 2, 3):
        starts.append(starts[-1] + size(rows, 1) - len(HEADER))
    return starts


def test_blocks_are_aligned() -> None:
    assert (len(HEADER) % 8, ROW_BYTES, BLOCK_DTYPE.itemsize, (size(1, 1) - len(HEADER)) % 8) == (0, 80, 32, 0)


def test_appended_rows_come_back_in_order_with_their_shards(path: Path) -> None:
    found = scan_journal(path)
    assert found.rows["row"].tolist() == [1, 11, 12, 21, 22, 23]
    assert found.rows["shard_number"].tolist() == [0, 1, 1, 2, 2, 2]
    assert found.rows["shard_generation"].tolist() == [4] * 6
    assert found.shards == {(4, 0): 1, (4, 1): 2, (4, 2): 3}
    assert found.starts == {(4, 0): (0, 1), (4, 1): (1, 2), (4, 2): (3, 3)}
    assert (found.damaged_at, found.torn) == ((), False)
    assert index_rows(found.rows[1:3]).tobytes() == index(11, 12).tobytes()
    assert path.stat().st_size == size(6, 3)


def test_an_absent_journal_is_empty(tmp_path: Path) -> None:
    assert len(read_journal(tmp_path / "absent")) == 0


def test_a_torn_end_is_left_out_whatever_its_length(path: Path) -> None:
    content, starts = path.read_bytes(), block_starts(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = sum(start <= length for start in starts) - 1
        found = scan_journal(path)
        assert len(found.rows) == [0, 0, 1, 3, 6][whole + 1], length
        assert found.torn == (length not in (0, *starts)), length
        assert not found.damaged_at


@pytest.mark.parametrize("zeros", [1, 31, 32, 80, 600, 5000])
def test_a_tail_of_zeros_is_torn_not_damaged(path: Path, zeros: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert len(read_journal(path)) == 6
    assert scan_journal(path).torn


def test_a_last_block_of_which_a_sector_never_came_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "j"
    append_journal(path, index(1), 1, 0)
    append_journal(path, index(*range(100, 140)), 1, 1)
    content = path.read_bytes()
    for sector in range(1, len(content) // 512 + 1):
        lost = bytearray(content)
        lost[sector * 512 : (sector + 1) * 512] = bytes(len(content[sector * 512 : (sector + 1) * 512]))
        path.write_bytes(lost)
        assert read_journal(path)["row"].tolist() == [1]
    first = bytearray(content)
    first[size(1, 1) : 512] = bytes(512 - size(1, 1))
    path.write_bytes(first)
    assert read_journal(path)["row"].tolist() == [1]


def test_every_flip_is_noticed_and_its_offset_named(path: Path) -> None:
    content, starts = path.read_bytes(), block_starts(path)
    for position in range(len(content)):
        for bit in (position % 8, (position * 5 + 3) % 8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            at = max([0, *(start for start in starts if start <= position)])
            with pytest.raises(StoreError, match=f"damaged at offset {at}\n"):
                read_journal(path)


def test_a_damaged_block_costs_no_other(path: Path) -> None:
    flipped = bytearray(path.read_bytes())
    flipped[block_starts(path)[1] + 50] ^= 1
    path.write_bytes(flipped)
    found = scan_journal(path)
    assert found.rows["row"].tolist() == [1, 21, 22, 23]
    assert found.damaged_at == (block_starts(path)[1],)


def test_a_rewritten_journal_holds_only_the_new_rows_and_every_shard(path: Path) -> None:
    found = scan_journal(path)
    kept = found.rows[found.rows["shard_number"] != 1][::-1]
    rewrite_journal(path, kept, found.shards)
    append_journal(path, index(9), 5, 0)
    again = scan_journal(path)
    assert again.rows["row"].tolist() == [1, 21, 22, 23, 9]
    assert again.shards == {**found.shards, (5, 0): 1}
    assert again.starts[4, 1] == (1, 0)
    with pytest.raises(StoreError, match="of others"):
        rewrite_journal(path, again.rows, found.shards)


def test_a_rewrite_that_fails_leaves_the_old_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        rewrite_journal(path, journal_rows(index(9), 1, 0), {(1, 0): 1})
    assert len(read_journal(path)) == 6
