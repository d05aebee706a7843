"""A prepared set gives back what it took, row by row, and is whole or absent."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PrepareError
from headrace.prepare.prepared import ROWS, Draft, PreparedSet, write_prepared
from headrace.record import sample_id


def draft(number: int, length: int) -> Draft:
    ids = np.arange(number, number + length, dtype=np.int32)
    mask = (np.arange(length) >= length // 2).astype(np.uint8)
    return Draft(sample_id(ids, mask), ids, mask, f"kind {number % 3}", number % 5 == 0, json.dumps([{"n": number}]))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_rows_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    folder = tmp_path_factory.mktemp("set")
    drafts = [draft(i, n) for i, n in enumerate(lengths)]
    write_prepared(folder, iter(drafts), {"fingerprint": "f"})
    opened = PreparedSet.open(folder)
    assert opened.lengths.tolist() == lengths
    for row, wanted in enumerate(drafts):
        sample = opened.sample(row)
        assert (sample.id, sample.source, sample.heldout) == (wanted.id, wanted.source, wanted.heldout)
        assert opened.sample_id(row) == wanted.id
        np.testing.assert_array_equal(sample.input_ids, wanted.input_ids)
        np.testing.assert_array_equal(sample.loss_mask, wanted.loss_mask)
        assert opened.messages(row) == [{"n": row}]
        assert opened.prompt_tokens[row] == len(wanted.loss_mask) - opened.trained_tokens[row]


def test_rows_beyond_one_batch_are_found(tmp_path: Path) -> None:
    write_prepared(tmp_path, (draft(i, 3) for i in range(ROWS + 5)), {"fingerprint": "f"})
    opened = PreparedSet.open(tmp_path)
    assert opened.num_samples == ROWS + 5
    assert opened.sample(ROWS + 4).input_ids[0] == ROWS + 4
    with pytest.raises(IndexError):
        opened.sample(ROWS + 5)


def test_trained_ids_are_counted_on_either_side_of_the_split(tmp_path: Path) -> None:
    write_prepared(tmp_path, (draft(i, 4) for i in range(ROWS + 5)), {"fingerprint": "f"})
    opened = PreparedSet.open(tmp_path)
    for heldout in (False, True):
        wanted = np.zeros(ROWS + 10, np.int64)
        for row in opened.rows(heldout=heldout).tolist():
            wanted[[row + 2, row + 3]] += 1
        np.testing.assert_array_equal(opened.trained_counts(ROWS + 10, heldout=heldout), wanted)
    with pytest.raises(PrepareError, match=f"ids below {ROWS}"):
        opened.trained_counts(ROWS)


def test_a_writer_that_dies_leaves_no_set(tmp_path: Path) -> None:
    def dying() -> object:
        yield draft(0, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prepared(tmp_path, dying(), {"fingerprint": "f"})  # type: ignore[arg-type]
    with pytest.raises(PrepareError, match="a prepared set"):
        PreparedSet.open(tmp_path)


def test_another_version_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    write_prepared(tmp_path, [draft(0, 3)], {"fingerprint": "f"})
    path = tmp_path / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"version": 0', '"version": 9'))
    with pytest.raises(PrepareError, match="version 0"):
        PreparedSet.open(tmp_path)
    path.write_text(text.replace('"num_samples": 1', '"num_samples": 2'))
    with pytest.raises(PrepareError, match="2 samples"):
        PreparedSet.open(tmp_path)
    (tmp_path / "samples.arrow").unlink()
    with pytest.raises(PrepareError, match=r"samples\.arrow"):
        PreparedSet.open(tmp_path)
