"""One writer's work for the crash checks, what it promises on the way, and the check of whatever is left of it.

In: a folder. Out: a store written by several writers one after the other, with superseded records, failures, removed
records and a writer that died; a check that nothing promised is lost, doubled or damaged, and that work goes on.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import StoreError
from headrace.store.reader import StoreReader
from headrace.store.remove import remove
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records

NUM_TOKENS = 150  # 9,600 bytes of payload: several pages a record
ROWS = 8
REMOVED = 7


@dataclass
class Promise:
    """What a writer has said is safe: row to generation, rows that failed, rows whose removal has begun."""

    rows: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    removing: set[int] = field(default_factory=set)

    def copy(self) -> "Promise":
        """As it is now."""
        return Promise(dict(self.rows), set(self.failed), set(self.removing))


Told = Callable[[Promise], None]


def record(row: int, generation: int):
    return fake_record(row, generation, 2, num_tokens=NUM_TOKENS)


def open_writer(root: Path) -> StoreWriter:
    return StoreWriter(root, fake_manifest(), 1 << 30, 1e9)


def work(root: Path, told: Told, cycles: int = 2, deaths: bool = True) -> None:
    """Write, supersede, fail, die, mend and remove; `told` after each thing that is safe from then on."""
    promise = Promise()

    def safe(writer: StoreWriter) -> None:
        promise.rows.update({row: generation for row, (_, generation) in writer.committed.items()})
        promise.failed.update(writer.failed)
        told(promise.copy())

    for cycle in range(cycles):
        with open_writer(root) as writer:
            safe(writer)
            for row in range(3):
                writer.add(record(row, writer.generation))
                if row != 1:
                    writer.seal()
                    safe(writer)
            writer.fail(fake_sample(20 + cycle, NUM_TOKENS).id, 20 + cycle, "constant states", True)
            safe(writer)
            writer.add(record(3 + cycle % 2, writer.generation))
        promise.rows[3 + cycle % 2] = writer.generation
        told(promise.copy())
    if deaths:
        _die_and_mend(root, safe)
        promise.removing.add(REMOVED)
        del promise.rows[REMOVED]
        told(promise.copy())
        remove(root, [REMOVED], superseded=True)
        told(promise.copy())


def _die_and_mend(root: Path, safe: Callable[[StoreWriter], None]) -> None:
    writer = open_writer(root)
    writer.add(record(6, writer.generation))
    writer.add(record(REMOVED, writer.generation))
    assert writer._shard is not None
    writer._shard.close()  # as a kill leaves it: an open shard, no lock
    writer._lock.release()
    with open_writer(root) as writer:
        safe(writer)


def check(root: Path, promise: Promise) -> bool:
    """Raise AssertionError if anything promised is lost, doubled or damaged, or if work does not go on.

    Returns: whether a reader could open what was left, before a writer mended it.
    """
    readable = _check_reader(root, promise)
    with open_writer(root) as writer:
        for row, generation in promise.rows.items():
            assert row in writer.committed, f"row {row} is lost"
            assert writer.committed[row][1] >= generation, f"row {row} is of an older generation"
        assert promise.failed <= set(writer.failed), "a failure is lost"
        for row in set(range(ROWS)) - set(writer.committed):
            writer.add(record(row, writer.generation))
    reader = StoreReader(root)
    assert reader.rows.tolist() == list(range(ROWS))
    for row, generation in zip(reader.rows.tolist(), reader.generations.tolist(), strict=True):
        found = reader.read(row, fake_sample(row, NUM_TOKENS).id)
        assert same_records(found, record(row, generation)), f"row {row} is damaged"
    reader.close()
    assert verify(root) == [], verify(root)
    assert all(path.name.endswith(".arrow") for path in (root / "shards").iterdir())
    with open_writer(root) as writer:
        assert writer.notes == [], writer.notes
    return readable


def _check_reader(root: Path, promise: Promise) -> bool:
    """What a reader gives, of whatever was left, is right or an error."""
    if not (root / "manifest.json").exists():
        assert not promise.rows, "a store with records has lost its manifest"
        return True
    try:
        reader = StoreReader(root)
    except StoreError:
        return False
    for row, generation in zip(reader.rows.tolist(), reader.generations.tolist(), strict=True):
        try:
            found = reader.read(row, fake_sample(row, NUM_TOKENS).id)
        except StoreError:
            continue
        assert same_records(found, record(row, found.generation)), f"row {row} was read wrong"
        assert found.generation <= generation
    reader.close()
    return True


def without_fsync() -> None:
    """A kill leaves the page cache alone, so a real fsync would only cost time."""
    os.fsync = lambda _: None  # type: ignore[assignment]
