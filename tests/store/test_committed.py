import numpy as np

from headrace.store.committed import Committed
from headrace.store.index import RecordIndex
from headrace.store.journal import journal_rows
from headrace.store.shard import INDEX_DTYPE


def index(*rows: int) -> RecordIndex:
    found = np.zeros(len(rows), INDEX_DTYPE)
    found["row"], found["generation"], found["num_segments"] = rows, 3, 1
    found["id"] = [np.void(row.to_bytes(16, "big")) for row in rows]
    return RecordIndex(journal_rows(found, 3, 0))


def entry(row: int, generation: int = 3) -> tuple[bytes, int]:
    return row.to_bytes(16, "big"), generation


def test_it_is_a_mapping_of_what_was_found() -> None:
    committed = Committed(index(5, 2, 900))
    assert committed == {2: entry(2), 5: entry(5), 900: entry(900)}
    assert (len(committed), 5 in committed, 3 in committed, "5" in committed) == (3, True, False, False)
    assert committed.get(3) is None


def test_later_rows_win_and_forgotten_ones_are_gone_until_they_come_again() -> None:
    committed = Committed(index(5, 2))
    committed.update({7: entry(7, 4), 2: entry(2, 4)})
    assert sorted(committed) == [2, 5, 7]
    assert committed[2] == entry(2, 4)
    committed.forget(2)
    committed.forget(5)
    committed.forget(66)
    assert sorted(committed) == [7]
    assert 2 not in committed
    committed.update({5: entry(5, 6)})
    assert committed == {7: entry(7, 4), 5: entry(5, 6)}


def test_nothing_found_is_empty() -> None:
    assert Committed(index()) == {}
