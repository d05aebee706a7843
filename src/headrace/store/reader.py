"""Read records of a states folder, in any order, from any number of threads.

In: a row and its id. Out: its newest record that is whole and intact, one positioned read a record, digests checked
before Arrow sees a byte. Payloads are views of the memory that holds the message, and keep it.
Readers never change a store, and see what was sealed when they opened it.
"""

import errno
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import StoreError
from headrace.record import Record, Segment, digest, segment_from_message
from headrace.store import failures, journal
from headrace.store.failures import Failure, read_failures
from headrace.store.index import RecordIndex
from headrace.store.journal import read_journal
from headrace.store.manifest import Manifest
from headrace.store.shard import Key, Rows, shard_name
from headrace.store.shard_files import FolderShards, Shards

READ_BYTES = 64 * 1024 * 1024  # a longer record takes one read for each so many bytes of segments


class DamagedRecord(StoreError):
    """A record whose bytes are not what was written; the disk itself answers."""


class StoreReader:
    """A snapshot of a store. `manifest` says of what; `failures` maps rows the target could not give."""

    def __init__(self, root: Path, shards: Shards | None = None) -> None:
        """Args: shards: where the shards are, if not in this folder.

        Raises: StoreError for a folder without states, or a damaged manifest, journal or list of failures.
        """
        self.root = root
        self.manifest = Manifest.read(root)
        rows = read_journal(root / journal.FILE_NAME)
        self._index = RecordIndex(rows)
        self.failures: dict[int, Failure] = read_failures(root / failures.FILE_NAME)
        self._files = shards or FolderShards(root)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 [N], ascending: rows of the prepared set that have a record."""
        return self._index.rows

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """int64 [N], in the order of `rows`: the generation of each record."""
        return self._index.generations

    @property
    def num_records(self) -> int:
        """N, superseded records not counted."""
        return len(self._index.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all records."""
        return self._index.total("tokens")

    @property
    def num_trained(self) -> int:
        """Trained tokens of all records."""
        return self._index.total("trained")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all records in shards: payload, ids, mask and framing."""
        return self._index.total("length")

    def missing_shards(self) -> list[str]:
        """File names of shards that hold records by the journal, and are not there now."""
        rows = self._index.newest()
        keys = set(zip(rows["shard_generation"].tolist(), rows["shard_number"].tolist(), strict=True))
        named = {shard_name(*key) for key in keys}
        return sorted(named - self._files.names())

    def __contains__(self, row: int) -> bool:
        return bool(self._index.candidates(row))

    def read(self, row: int, id: bytes) -> Record:
        """Read the newest intact record of a row.

        Raises: StoreError when there is none; DamagedRecord, naming shard and offset of the newest one, where all are
        damaged; StoreError when the row's record has another id, and where the disk does not answer.
        """
        error: DamagedRecord | None = None
        for segments in self._candidates(row, id):
            try:
                return Record(self._read_segments(segments))
            except DamagedRecord as exc:
                error = error or exc
        assert error is not None
        raise error

    def read_tokens(self, row: int, id: bytes, start: int, end: int) -> tuple[Segment, ...]:
        """Read only the segments that hold tokens [start, end) of those stored of a row, in order.

        A payload is cut nowhere but at segments: the first and the last one may hold tokens outside the range.
        Raises: as `read`; StoreError for a range that is empty or not within the sample.
        """
        error: DamagedRecord | None = None
        for segments in self._candidates(row, id):
            ends = np.cumsum(segments["tokens"])
            if not 0 <= start < end <= int(ends[-1]):
                found = f"tokens {start} to {end}"
                raise StoreError(f"a range within the {int(ends[-1])} tokens of row {row}", found, "ask for less")
            first, last = np.searchsorted(ends, [start, end - 1], side="right")
            try:
                return self._read_segments(segments[first : last + 1])
            except DamagedRecord as exc:
                error = error or exc
        assert error is not None
        raise error

    def stored(self, row: int, id: bytes) -> "StoredRecord":
        """The newest record of a row, to be passed on; nothing is read yet. Raises: as `read`, but for damage."""
        return StoredRecord(self, [_Place(*segment) for segment in self._candidates(row, id)[0].tolist()])

    def entries(self) -> Rows:
        """JOURNAL_DTYPE [S]: segments of the newest record of every row, by row and segment."""
        return self._index.newest()

    def id_of(self, row: int) -> bytes:
        """The id of a row's newest record. Raises: StoreError when there is none."""
        return bytes(self._found(row)[0]["id"][0])

    def close(self) -> None:
        """Close shards; safe to call twice. A closed reader opens them again when asked."""
        self._files.clear()

    def _found(self, row: int) -> list[Rows]:
        candidates = self._index.candidates(row)
        if not candidates:
            raise StoreError(
                f"a record of row {row}", f"none in {self._files.where}", "run capture; it makes what is missing"
            )
        return candidates

    def _candidates(self, row: int, id: bytes) -> list[Rows]:
        candidates = self._found(row)
        stored = bytes(candidates[0]["id"][0])
        if stored != id:
            hint = "read with the prepared set these states were captured from"
            raise StoreError(f"row {row} with id {id.hex()}", f"{stored.hex()} in {self._files.where}", hint)
        return candidates

    def _read_segments(self, rows: Rows) -> tuple[Segment, ...]:
        """Read segments that lie one after the other together, up to READ_BYTES at once."""
        found: list[Segment] = []
        while len(found) < len(rows):
            first = len(found)
            run = [_Place(*row) for row in rows[first : first + _run(rows[first:])].tolist()]
            start = run[0].offset
            content = self._pread(run[0], start, run[-1].offset + run[-1].length - start)
            for place in run:
                at = place.offset - start
                found.append(self._segment(place, content[at : at + place.length]))
        return tuple(found)

    def _pread(self, place: "_Place", offset: int, length: int) -> memoryview:
        try:
            return self._files.view(place.shard, offset, length)
        except OSError as exc:
            if exc.errno == errno.EIO:  # a bad place on a disk that is there
                raise DamagedRecord(self._whole(place), f"offset {offset}: {exc.strerror}", self._files.hint) from exc
            raise StoreError(self._whole(place), f"offset {offset}: {exc.strerror}", self._files.hint) from exc

    def _segment(self, place: "_Place", message: memoryview) -> Segment:
        offset, length = place.offset, place.length
        if len(message) != length:
            raise DamagedRecord(
                self._whole(place), f"{len(message)} of {length} bytes at offset {offset}", self._files.hint
            )
        try:
            segment = segment_from_message(message, place.digest)
        except StoreError as exc:
            raise DamagedRecord(
                self._whole(place), f"digest {exc.args[1]} at offset {offset}", self._files.hint
            ) from exc
        if _key(segment) != place[:5]:
            raise DamagedRecord(
                self._whole(place), f"another segment, {_key(segment)}, at offset {offset}", self._files.hint
            )
        return segment

    def _message(self, place: "_Place") -> memoryview:
        message = self._pread(place, place.offset, place.length)
        if len(message) != place.length or digest(message) != place.digest:
            found = f"other bytes at offset {place.offset}"
            raise DamagedRecord(self._whole(place), found, self._files.hint)
        return message

    def _whole(self, place: "_Place") -> str:
        return f"segment {place.segment} of row {place.row} intact in {self._files.where}/{shard_name(*place.shard)}"


class StoredRecord:
    """A record as it is passed on: each segment read when it is asked for, its digest checked, nothing parsed.

    `lengths`: bytes of each segment's message, known from the index.
    """

    def __init__(self, reader: StoreReader, places: "list[_Place]") -> None:
        self._reader, self._places = reader, places
        self.row, self.id = places[0].row, places[0].id
        self.lengths = tuple(place.length for place in places)

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages: payload, ids, mask and framing."""
        return sum(self.lengths)

    def message(self, segment: int) -> tuple[memoryview, bytes]:
        """A segment's message and its digest. Raises: DamagedRecord; StoreError where the disk does not answer."""
        place = self._places[segment]
        return self._reader._message(place), place.digest

    def record(self) -> Record:
        """The whole record, parsed. Raises: as `message`."""
        return Record(tuple(segment_from_message(*self.message(k)) for k in range(len(self._places))))


class _Place(NamedTuple):
    """One row of the journal as plain numbers: numpy takes a microsecond for each field."""

    row: int
    id: bytes
    generation: int
    segment: int
    num_segments: int
    offset: int
    length: int
    digest: bytes
    tokens: int
    trained: int
    shard_generation: int
    shard_number: int

    @property
    def shard(self) -> Key:
        """Which shard it lies in."""
        return self.shard_generation, self.shard_number


def _run(rows: Rows) -> int:
    """How many of the first rows lie one after the other in one shard, within READ_BYTES (or one)."""
    if len(rows) == 1:
        return 1
    ends = rows["offset"] + rows["length"]
    follows = (rows["offset"][1:] == ends[:-1]) & (rows["shard_number"][1:] == rows["shard_number"][:-1])
    follows &= rows["shard_generation"][1:] == rows["shard_generation"][:-1]
    follows &= ends[1:] - rows["offset"][0] <= READ_BYTES
    return 1 + (len(follows) if follows.all() else int(np.argmin(follows)))


def _key(segment: Segment) -> tuple[int, bytes, int, int, int]:
    return segment.row, segment.id, segment.generation, segment.segment, segment.num_segments
