"""Read records of a states folder, in any order, from any number of threads.

In: a row and its id. Out: its newest record that is whole and intact, one positioned read a segment, digests checked
before Arrow sees a byte. Readers never change a store, and see what was sealed when they opened it.
"""

import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import StoreError
from headrace.record import Record, Segment, segment_from_message
from headrace.store import failures, journal
from headrace.store.failures import Failure, read_failures
from headrace.store.index import RecordIndex
from headrace.store.journal import read_journal
from headrace.store.manifest import Manifest
from headrace.store.shard import shard_name

_MAX_OPEN_FILES = 64


class StoreReader:
    """A snapshot of a store. `manifest` says of what; `failures` maps rows the target could not give."""

    def __init__(self, root: Path) -> None:
        """Raises: StoreError for a folder without states, or a damaged manifest, journal or list of failures."""
        self.root = root
        self.manifest = Manifest.read(root)
        rows = read_journal(root / journal.FILE_NAME)
        self._index = RecordIndex(rows)
        self._newest = self._index.newest()
        self.failures: dict[int, Failure] = read_failures(root / failures.FILE_NAME)
        self._files = _Files(root / "shards")

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 [N], ascending: rows of the prepared set that have a record."""
        return self._index.rows

    @property
    def num_records(self) -> int:
        """N, superseded records not counted."""
        return len(self._index.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all records."""
        return int(self._newest["tokens"].sum(dtype=np.int64)) if self.num_records else 0

    @property
    def num_trained(self) -> int:
        """Trained tokens of all records."""
        return int(self._newest["trained"].sum(dtype=np.int64)) if self.num_records else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records in shards: payload, ids, mask and framing."""
        return int(self._newest["length"].sum(dtype=np.uint64)) if self.num_records else 0

    def missing_shards(self) -> list[str]:
        """File names of shards that hold records by the journal, and are not on the disk now."""
        keys = zip(self._newest["shard_generation"].tolist(), self._newest["shard_number"].tolist(), strict=True)
        named = {shard_name(*key) for key in keys}
        return sorted(name for name in named if not (self.root / "shards" / name).is_file())

    def __contains__(self, row: int) -> bool:
        return bool(self._index.candidates(row))

    def read(self, row: int, id: bytes) -> Record:
        """Read the newest intact record of a row.

        Raises: StoreError when there is none, naming shard and offset of the newest one if it is damaged; or when the
        row's record has another id.
        """
        candidates = self._index.candidates(row)
        if not candidates:
            raise StoreError(f"a record of row {row}", f"none in {self.root}", "run capture; it makes what is missing")
        stored = bytes(candidates[0]["id"][0])
        if stored != id:
            hint = "read with the prepared set these states were captured from"
            raise StoreError(f"row {row} with id {id.hex()}", f"{stored.hex()} in {self.root}", hint)
        error: StoreError | None = None
        for segments in candidates:
            try:
                return Record(tuple(self._read_segment(segment) for segment in segments))
            except StoreError as exc:
                error = error or exc
        assert error is not None
        raise error

    def close(self) -> None:
        """Close shards; safe to call twice. A closed reader opens them again when asked."""
        self._files.clear()

    def _read_segment(self, row: np.void) -> Segment:
        name = shard_name(int(row["shard_generation"]), int(row["shard_number"]))
        offset, length = int(row["offset"]), int(row["length"])
        where = f"segment {int(row['segment'])} of row {int(row['row'])} intact in {self.root / 'shards' / name}"
        hint = "run store repair, then capture again: it makes only the rows that are lost"
        try:
            message = self._files.read(name, offset, length)
        except OSError as exc:
            raise StoreError(where, f"offset {offset}: {exc.strerror}", hint) from exc
        if len(message) != length:
            raise StoreError(where, f"{len(message)} of {length} bytes at offset {offset}", hint)
        try:
            segment = segment_from_message(message, bytes(row["digest"]))
        except StoreError as exc:
            raise StoreError(where, f"digest {exc.args[1]} at offset {offset}", hint) from exc
        if _key(segment) != _index_key(row):
            raise StoreError(where, f"another segment, {_key(segment)}, at offset {offset}", hint)
        return segment


def _key(segment: Segment) -> tuple[int, bytes, int, int, int]:
    return segment.row, segment.id, segment.generation, segment.segment, segment.num_segments


def _index_key(row: np.void) -> tuple[int, bytes, int, int, int]:
    numbers = (int(row["generation"]), int(row["segment"]), int(row["num_segments"]))
    return int(row["row"]), bytes(row["id"]), *numbers


class _File:
    """A descriptor that closes when nobody reads from it any more, even if it has left the cache meanwhile."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class _Files:
    """Open shards, least recently used first, at most _MAX_OPEN_FILES."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer at the end of the file."""
        file = self._get(name)
        return os.pread(file.descriptor, length, offset)

    def clear(self) -> None:
        with self._lock:
            self._open.clear()

    def _get(self, name: str) -> _File:
        with self._lock:
            file = self._open.pop(name, None) or _File(self._folder / name)
            self._open[name] = file
            while len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
            return file
