"""One shard: an immutable file of records that ends with its own index.

In: segments, in any order of rows. Out: an Arrow IPC stream that stock readers open, followed by index rows and a tail
with a digest. While it is being written it is called `.open`, and a sidecar `.open.index` says what it holds so far,
so that a killed writer's records can be proved intact. Layout: docs/formats/store-1.md.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from headrace.errors import StoreError
from headrace.files import fsync_folder
from headrace.record import DIGEST_BYTES, SCHEMA, Segment, digest, segment_to_message
from headrace.store.append import AppendFile
from headrace.store.digested import dump_digested, load_digested

INDEX_DTYPE = np.dtype(
    [
        ("row", "<i8"),
        ("id", "V16"),
        ("generation", "<i8"),
        ("segment", "<i4"),
        ("num_segments", "<i4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("digest", "V16"),
        ("tokens", "<i4"),
        ("trained", "<i4"),
    ]
)
SIDECAR_DTYPE = np.dtype([("index", INDEX_DTYPE), ("check", "<u8")])
MAGIC = b"HRSHARD1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
TAIL_BYTES = 8 + 2 * DIGEST_BYTES + 8 + len(MAGIC)

Rows = npt.NDArray[np.void]
Key = tuple[int, int]  # (generation, number) of a shard
_NAME = re.compile(r"(\d{6,})-(\d{6,})\.arrow")


def shard_name(generation: int, number: int) -> str:
    """File name of a shard: the writer's generation and the shard's number within it."""
    return f"{generation:06d}-{number:06d}.arrow"


def parse_shard_name(name: str) -> Key | None:
    """(generation, number) of a sealed shard's file name; None for any other file."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def shard_files(root: Path) -> list[str]:
    """Names of everything in a store's folder of shards, sorted.

    Raises: StoreError where it cannot be read.
    """
    try:
        return sorted(os.listdir(root / "shards"))
    except OSError as exc:
        hint = "restore the folder, or capture again: capture makes the records that are missing"
        raise StoreError(f"the shards of the store in {root / 'shards'}", exc.strerror or str(exc), hint) from exc


def sealed_shards(root: Path) -> dict[str, Key]:
    """A store's sealed shards, sorted: (generation, number) by file name. Raises: as `shard_files`."""
    return {name: key for name in shard_files(root) if (key := parse_shard_name(name)) is not None}


def open_path(path: Path) -> Path:
    """Where the shard that will be `path` is being written."""
    return path.with_name(path.name + ".open")


def sidecar_path(path: Path) -> Path:
    """Where the index of the shard that is being written grows."""
    return path.with_name(path.name + ".open.index")


def index_row(segment: Segment, offset: int, message: bytes | memoryview) -> Rows:
    """The index row [1] of a segment whose message lies at `offset`."""
    row = np.zeros(1, INDEX_DTYPE)
    row["row"] = segment.row
    row["id"] = np.void(segment.id)
    row["generation"] = segment.generation
    row["segment"] = segment.segment
    row["num_segments"] = segment.num_segments
    row["offset"] = offset
    row["length"] = len(message)
    row["digest"] = np.void(digest(message))
    row["tokens"] = segment.num_tokens
    row["trained"] = int(segment.loss_mask.sum())
    return row


class ShardWriter:
    """Writes one shard; nobody lists it before `seal` returns."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        """Args: path: the final name. provenance: JSON values, kept in the schema message's metadata."""
        self.path = path
        self._rows: list[Rows] = []
        # The sidecar first: a shard without one cannot be salvaged.
        self._sidecar = AppendFile(sidecar_path(path))
        self._file = AppendFile(open_path(path))
        metadata = {**(SCHEMA.metadata or {}), b"provenance": dump_digested(provenance).encode()}
        self._schema_message = bytes(SCHEMA.with_metadata(metadata).serialize())
        self._file.write(self._schema_message)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._file.num_bytes

    @property
    def num_index_bytes(self) -> int:
        """Bytes that sealing adds, and the journal's rows."""
        return 2 * INDEX_DTYPE.itemsize * len(self._rows)

    def add(self, segment: Segment) -> None:
        """Append a segment."""
        message = segment_to_message(segment)
        self.add_message(message, index_row(segment, self.num_bytes, message))

    def add_message(self, message: bytes | memoryview, row: Rows) -> None:
        """Append a message that is known to be intact, under its index row (the offset is set here)."""
        row = row.copy()
        row["offset"] = self.num_bytes
        self._file.write(message)
        self._sidecar.write(row.tobytes() + _check(row.tobytes()))
        self._rows.append(row)

    def seal(self) -> Rows:
        """Write index and tail, fsync, publish by rename, fsync the folder. Returns: the index rows."""
        rows = np.concatenate(self._rows)
        index = rows.tobytes()
        tail = len(index).to_bytes(8, "little") + digest(self._schema_message) + digest(index)
        self._file.write(END_OF_STREAM + index + tail + _check(tail) + MAGIC)
        self._file.sync()
        self.close()
        os.replace(self._file.path, self.path)
        fsync_folder(self.path.parent)
        self._sidecar.path.unlink()
        return rows

    def close(self) -> None:
        """Release the files and leave what is on disk to be salvaged."""
        self._file.close()
        self._sidecar.close()


def read_sidecar(path: Path) -> Rows:
    """Index rows of a shard that was never sealed, up to the first one that is torn or damaged."""
    content = path.read_bytes() if path.exists() else b""
    size = SIDECAR_DTYPE.itemsize
    good: list[bytes] = []
    for start in range(0, len(content) - size + 1, size):
        row, check = content[start : start + INDEX_DTYPE.itemsize], content[start + INDEX_DTYPE.itemsize : start + size]
        if _check(row) != check:
            break
        good.append(row)
    return np.frombuffer(b"".join(good), INDEX_DTYPE)


def read_trailer(path: Path) -> Rows:
    """Index rows of a sealed shard, once its length, tail and digests agree.

    Raises: StoreError naming the shard and what is wrong with it.
    """
    try:
        with open(path, "rb") as shard:
            return _read_trailer(path, shard.fileno())
    except OSError as exc:
        raise StoreError("a readable shard", f"{path}: {exc.strerror}", "restore it, or capture again") from exc


def _read_trailer(path: Path, shard: int) -> Rows:
    size = os.fstat(shard).st_size
    tail_start = max(size - TAIL_BYTES, 0)
    tail = os.pread(shard, TAIL_BYTES, tail_start)
    covered = TAIL_BYTES - 8 - len(MAGIC)
    if tail[-len(MAGIC) :] != MAGIC or tail[covered:-8] != _check(tail[:covered]):
        raise _torn(path, f"{size} bytes that do not end with a shard's tail")
    index_bytes = int.from_bytes(tail[:8], "little")
    stream_end = tail_start - index_bytes - len(END_OF_STREAM)
    if stream_end < 0:
        raise _torn(path, f"{size} bytes with an index of {index_bytes}")
    index = os.pread(shard, index_bytes, tail_start - index_bytes)
    if digest(index) != tail[8 + DIGEST_BYTES : covered]:
        raise _torn(path, "an index whose digest does not match")
    rows = np.frombuffer(index, INDEX_DTYPE)
    first = int(rows["offset"].min(initial=stream_end)) if len(rows) else stream_end
    if digest(os.pread(shard, first, 0)) != tail[8 : 8 + DIGEST_BYTES]:
        raise _torn(path, "a schema message whose digest does not match")
    if os.pread(shard, len(END_OF_STREAM), stream_end) != END_OF_STREAM or not _contiguous(rows, first, stream_end):
        raise _torn(path, f"no end of stream where the messages end, at byte {stream_end}")
    return rows


def read_provenance(path: Path) -> dict[str, Any]:
    """Provenance that a sealed shard was written under. Raises: StoreError for a damaged shard."""
    read_trailer(path)  # Arrow parses the schema message only after its digest was checked
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        metadata = stream.schema.metadata
    return load_digested(metadata[b"provenance"], f"the provenance in {path}")


def _contiguous(rows: Rows, start: int, end: int) -> bool:
    stops = np.concatenate([[start], rows["offset"] + rows["length"]]).astype(np.uint64)
    return bool(np.array_equal(stops[:-1], rows["offset"]) and int(stops[-1]) == end)


def _check(row: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(row).to_bytes(8, "little")


def _torn(path: Path, found: str) -> StoreError:
    return StoreError(f"{path} as it was sealed", found, "run store repair, then capture again")
