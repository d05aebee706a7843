import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.store.index import RecordIndex
from headrace.store.journal import JOURNAL_DTYPE, journal_rows
from headrace.store.shard import INDEX_DTYPE, Rows


def segment_rows(keys: list[tuple[int, int, int, int]]) -> Rows:
    """Rows from (row, generation, segment, num_segments)."""
    index = np.zeros(len(keys), INDEX_DTYPE)
    for k, (row, generation, segment, num_segments) in enumerate(keys):
        index[k]["row"], index[k]["generation"] = row, generation
        index[k]["segment"], index[k]["num_segments"] = segment, num_segments
        index[k]["id"] = np.void(row.to_bytes(16, "big"))
    return journal_rows(index, 1, 0)


def test_an_empty_index_holds_nothing() -> None:
    index = RecordIndex(np.zeros(0, JOURNAL_DTYPE))
    assert index.rows.tolist() == []
    assert index.candidates(0) == []
    assert len(index.newest()) == 0


def test_the_newest_generation_comes_first() -> None:
    index = RecordIndex(segment_rows([(5, 1, 0, 1), (5, 3, 0, 1), (5, 2, 0, 1), (4, 1, 0, 1)]))
    assert [int(c["generation"][0]) for c in index.candidates(5)] == [3, 2, 1]
    assert index.rows.tolist() == [4, 5]
    assert index.generations.tolist() == [1, 3]
    assert bytes(index.ids[1]) == (5).to_bytes(16, "big")


def test_a_record_with_a_segment_missing_is_not_there() -> None:
    index = RecordIndex(segment_rows([(1, 1, 0, 3), (1, 1, 2, 3), (2, 2, 0, 2), (2, 1, 0, 1)]))
    assert index.rows.tolist() == [2]
    assert index.generations.tolist() == [1]


def test_segments_that_disagree_on_their_number_make_no_record() -> None:
    assert RecordIndex(segment_rows([(1, 1, 0, 2), (1, 1, 1, 3)])).rows.tolist() == []


KEYS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)), max_size=40)


@given(keys=KEYS)
def test_the_index_agrees_with_a_plain_dictionary(keys: list[tuple[int, int, int, int]]) -> None:
    records: dict[tuple[int, int], dict[int, int]] = {}
    for row, generation, segment, num_segments in keys:
        records.setdefault((row, generation), {}).setdefault(segment, num_segments)
    whole: dict[int, list[int]] = {}
    for (row, generation), segments in records.items():
        if all(segments.get(k) == len(segments) for k in range(len(segments))):
            whole.setdefault(row, []).append(generation)
    index = RecordIndex(segment_rows(keys))
    assert index.rows.tolist() == sorted(whole)
    for row in range(6):
        found = index.candidates(row)
        assert [int(c["generation"][0]) for c in found] == sorted(whole.get(row, []), reverse=True)
        assert all(c["segment"].tolist() == list(range(len(c))) for c in found)
    newest = [(row, max(generations)) for row, generations in sorted(whole.items())]
    expected = [(r, g, k) for r, g in newest for k in range(len(records[r, g]))]
    assert [(int(s["row"]), int(s["generation"]), int(s["segment"])) for s in index.newest()] == expected
