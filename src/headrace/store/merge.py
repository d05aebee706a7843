"""Several stores of one prepared set into one.

In: states of the same identity, in folders or at addresses, each with a part of the rows, as machines of a fleet leave
them. Out: one folder or address; of a row that several hold, the highest generation wins, and among equals the place
named first. A merge that was killed goes on.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from headrace.errors import StoreError
from headrace.files import write_atomic
from headrace.record import Record
from headrace.store.manifest import Manifest
from headrace.store.objects import is_address
from headrace.store.reader import DamagedRecord, StoreReader
from headrace.store.remote import open_reader, read_ahead
from headrace.store.remote_writer import RemoteWriter
from headrace.store.verify import BASIS_NAME
from headrace.store.writer import StoreWriter

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Merged:
    """Rows now in the merged store, rows that were damaged wherever they lay, and failures taken over."""

    num_records: int
    damaged: tuple[int, ...]
    num_failures: int
    notes: tuple[str, ...]


def merge(
    places: Sequence[str | Path],
    out: str | Path,
    shard_bytes: int,
    shard_seconds: float,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Copy every row of `places` into `out`, its digests checked.

    Args: progress: called with (rows done, rows in all).
    Raises: StoreError for stores of different identities (naming the field), for one row with two ids, and for an
    `out` that is one of the places.
    """
    if _resolved(out) in {_resolved(place) for place in places}:
        raise StoreError("another place to merge into", str(out), "give --out a folder or an address of its own")
    readers = [open_reader(place) for place in places]
    for reader in readers[1:]:
        readers[0].manifest.compare(reader.manifest, str(places[0]))
    rows, numbers = _everything(readers)
    made_by = {**readers[0].manifest.provenance, "merged_from": [str(place) for place in places]}
    manifest = replace(readers[0].manifest, provenance=made_by)
    unique, starts = np.unique(rows, return_index=True)
    damaged: list[int] = []

    def read(row: int) -> Record | None:
        holders = numbers[starts[np.searchsorted(unique, row)] : np.searchsorted(rows, row, side="right")]
        return _read(row, [readers[k] for k in holders])

    with ExitStack() as opened:
        writer = opened.enter_context(_writer(out, manifest, shard_bytes, shard_seconds, opened))
        _copy_basis(readers[0].root, writer.root)
        missing = [row for row in unique.tolist() if row not in writer.committed]
        far = next((place for place in places if is_address(str(place))), places[0])
        for done, (row, record) in enumerate(read_ahead(far, read, missing), len(unique) - len(missing) + 1):
            if record is None:
                damaged.append(row)
            else:
                writer.add(_of_generation(record, writer.generation))
            if progress is not None:
                progress(done, len(unique))
        num_failures = _take_failures(readers, set(unique.tolist()), writer)
        notes = tuple(note for note in writer.notes if not note.startswith("provenance: merged_from"))
    for reader in readers:
        reader.close()
    return Merged(len(unique) - len(damaged), tuple(damaged), num_failures, notes)


def _resolved(place: str | Path) -> str:
    return str(place).rstrip("/") if is_address(str(place)) else str(Path(place).resolve())


def _writer(out: str | Path, manifest: Manifest, shard_bytes: int, shard_seconds: float, end: ExitStack) -> StoreWriter:
    """A writer of a folder, or of objects with a staging folder that goes at the end."""
    if not is_address(str(out)):
        return StoreWriter(Path(out), manifest, shard_bytes, shard_seconds)
    staging = Path(end.enter_context(TemporaryDirectory()))
    return RemoteWriter(str(out), staging, manifest, shard_bytes, shard_seconds)


def _everything(readers: Sequence[StoreReader]) -> tuple[Ints, Ints]:
    """Row of every record, and the number of its reader; by row, best first."""
    rows = np.concatenate([reader.rows for reader in readers])
    generations = np.concatenate([reader.generations for reader in readers])
    places = np.repeat(np.arange(len(readers)), [reader.num_records for reader in readers])
    order = np.lexsort((places, -generations, rows))
    return rows[order], places[order]


def _read(row: int, readers: Sequence[StoreReader]) -> Record | None:
    """The first intact record; None where all are damaged."""
    ids = {reader.id_of(row) for reader in readers}
    if len(ids) > 1:
        found = ", ".join(sorted(id.hex() for id in ids))
        raise StoreError(f"one id of row {row} in every store", found, "merge stores of one prepared set")
    for reader in readers:
        try:
            return reader.read(row, *ids)
        except DamagedRecord:
            continue
    return None


def _of_generation(record: Record, generation: int) -> Record:
    return Record(tuple(replace(segment, generation=generation) for segment in record.segments))


def _copy_basis(folder: Path, out: Path) -> None:
    basis = folder / BASIS_NAME
    if basis.exists() and not (out / BASIS_NAME).exists():
        write_atomic(out / BASIS_NAME, basis.read_bytes())


def _take_failures(readers: Sequence[StoreReader], stored: set[int], writer: StoreWriter) -> int:
    taken = 0
    for reader in readers:
        for row, failure in reader.failures.items():
            if failure.permanent and row not in stored and row not in writer.failed:
                writer.fail(bytes.fromhex(failure.id), row, failure.reason, permanent=True)
                taken += 1
    return taken
