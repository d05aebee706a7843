"""The journal: where every record lies, in one file that is read once.

In: index rows of sealed shards. Out: `index.journal`, a header and one block a shard, each with a digest of its own;
appended and fsynced after its shard is durable, compacted at close. A torn end is no error, damage elsewhere is.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.errors import StoreError
from headrace.files import fsync_folder, write_atomic
from headrace.record import DIGEST_BYTES, digest
from headrace.store.append import AppendFile
from headrace.store.shard import INDEX_DTYPE, Key, Rows

FILE_NAME = "index.journal"
VERSION = 1
ROW_BYTES = INDEX_DTYPE.itemsize
HEADER = b"HRJOURN1" + VERSION.to_bytes(4, "little") + ROW_BYTES.to_bytes(4, "little")
# A row in memory: the index row, and the shard that its block names.
JOURNAL_DTYPE = np.dtype([*INDEX_DTYPE.descr, ("shard_generation", "<i8"), ("shard_number", "<i8")])
BLOCK_DTYPE = np.dtype(
    [
        ("mark", "S4"),
        ("num_rows", "<u4"),
        ("generation", "<i8"),
        ("number", "<i8"),
        ("shard_rows", "<u4"),
        ("check", "<u4"),
    ]
)
MARK = b"BLK1"
_HEAD = struct.Struct("<4sIqqII")  # BLOCK_DTYPE; numpy would take twenty times as long for one
_WINDOW_BYTES = 1 << 20
SECTOR_BYTES = 512  # what a disk writes whole: a torn append leaves such pieces as zeros
_HINT = "run store repair: it makes the journal anew from the shards"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Journal:
    """What a scan found: `rows` JOURNAL_DTYPE of sound blocks, in file order.

    `shards` maps each shard with a block to its rows in the shard itself; `starts` to where its block's rows begin in
    `rows`, and how many they are. `damaged_at` are offsets of damaged blocks; `torn` whether the end is to be cut off.
    """

    rows: Rows
    shards: Mapping[Key, int]
    starts: Mapping[Key, tuple[int, int]]
    damaged_at: tuple[int, ...]
    torn: bool


class _Block(NamedTuple):
    """What the header of a block says."""

    num_rows: int
    generation: int
    number: int
    shard_rows: int

    @property
    def num_bytes(self) -> int:
        """Of the whole block."""
        return BLOCK_DTYPE.itemsize + self.num_rows * ROW_BYTES + DIGEST_BYTES


def journal_rows(index: Rows, generation: int, number: int) -> Rows:
    """Index rows of shard (generation, number) as journal rows."""
    rows = np.zeros(len(index), JOURNAL_DTYPE)
    _bytes_of(rows)[:, :ROW_BYTES] = _bytes_of(np.ascontiguousarray(index))
    rows["shard_generation"] = generation
    rows["shard_number"] = number
    return rows


def index_rows(rows: Rows) -> Rows:
    """Journal rows as the index rows they were made of."""
    index = np.zeros(len(rows), INDEX_DTYPE)
    _bytes_of(index)[:] = _bytes_of(np.ascontiguousarray(rows))[:, :ROW_BYTES]
    return index


def read_journal(path: Path) -> Rows:
    """Every row of a journal, in file order; a torn end is left out, an absent file has none.

    Raises: StoreError naming the offset of a damaged header or block.
    """
    found = scan_journal(path)
    if found.damaged_at:
        raise _damaged(path, found.damaged_at[0])
    return found.rows


def scan_journal(path: Path) -> Journal:
    """Rows of the sound blocks of a journal, and where it is damaged or torn.

    A torn end is a block cut short by the end of the file, or one there with a sector of zeros (a file that grew before
    its content reached the disk). Behind a damaged block header nothing is read.
    Raises: StoreError for a damaged file header.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return _scan(path, _Window(file.fileno()))
    except FileNotFoundError:
        return Journal(np.zeros(0, JOURNAL_DTYPE), {}, {}, (), torn=False)
    except OSError as exc:
        raise StoreError("a readable journal", f"{path}: {exc.strerror}", "remove it, then run store repair") from exc


def size(num_rows: int, num_shards: int) -> int:
    """Bytes of a journal."""
    return len(HEADER) + num_rows * ROW_BYTES + num_shards * (BLOCK_DTYPE.itemsize + DIGEST_BYTES)


def append_journal(path: Path, index: Rows, generation: int, number: int) -> None:
    """Append the block of shard (generation, number) to a journal that ends with a whole one, and make it durable."""
    journal = AppendFile(path)
    try:
        new = journal.num_bytes == 0
        journal.write((HEADER if new else b"") + block(index, generation, number, len(index)))
        journal.sync()
    finally:
        journal.close()
    if new:
        fsync_folder(path.parent)


def rewrite_journal(path: Path, rows: Rows, shards: Mapping[Key, int]) -> None:
    """Replace a journal by one with these rows, atomically. Args: as `blocks_of`."""
    write_atomic(path, HEADER + blocks_of(rows, shards))


def blocks_of(rows: Rows, shards: Mapping[Key, int]) -> bytes:
    """A journal's blocks that hold these rows.

    Args: shards: every shard that gets a block, also one without rows, and its rows in the shard itself.
    """
    rows = rows[np.lexsort((rows["offset"], rows["shard_number"], rows["shard_generation"]))]
    index = index_rows(rows)
    blocks, start = [], 0
    for key in sorted(shards):
        stop = start
        while stop < len(rows) and (rows["shard_generation"][stop], rows["shard_number"][stop]) == key:
            stop += 1
        blocks.append(block(index[start:stop], *key, shards[key]))
        start = stop
    if start != len(rows):
        raise StoreError("rows of the shards named", f"{len(rows) - start} of others", "this is a fault of headrace")
    return b"".join(blocks)


def block(index: Rows, generation: int, number: int, shard_rows: int) -> bytes:
    """The block of shard (generation, number), which has `shard_rows` rows of its own."""
    head = np.zeros(1, BLOCK_DTYPE)
    head["mark"], head["num_rows"], head["shard_rows"] = MARK, len(index), shard_rows
    head["generation"], head["number"] = generation, number
    head["check"] = _check(head.tobytes())
    body = index.tobytes()
    return head.tobytes() + body + digest(head.tobytes(), body)


class _Window:
    """A file through one small buffer: memory for all of it would cost more than to read it."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor, self._start, self._end = descriptor, 0, 0
        self._buffer = memoryview(bytearray(_WINDOW_BYTES))

    def at(self, place: int, num_bytes: int) -> memoryview:
        """Bytes of the file, fewer where it ends; valid until the next call."""
        end = place + num_bytes
        if place < self._start or end > self._end:
            end = min(end, self.size)
            if end - place > len(self._buffer):
                self._buffer = memoryview(bytearray(end - place))
            self._start, self._end = place, place + os.preadv(self._descriptor, [self._buffer], place)
            end = min(end, self._end)
        return self._buffer[place - self._start : end - self._start]


def _scan(path: Path, file: _Window) -> Journal:
    if file.at(0, len(HEADER)) != HEADER[: file.size]:
        raise _damaged(path, 0)
    # Not np.empty: it asks for huge pages, which took four times as long to come (virtual machine, 88 MB: 0.25 s).
    most = max(file.size - len(HEADER), 0) // ROW_BYTES
    rows = np.frombuffer(bytearray(most * JOURNAL_DTYPE.itemsize), JOURNAL_DTYPE)
    flat, filled = _bytes_of(rows), 0
    found: list[_Block] = []
    damaged: list[int] = []
    place, torn = min(file.size, len(HEADER)), 0 < file.size < len(HEADER)
    while place < file.size:
        block = _head(file.at(place, BLOCK_DTYPE.itemsize))
        length = file.size - place if block is None else block.num_bytes
        content = file.at(place, length)
        if block is not None and _sound(content, block):
            body = np.frombuffer(content, np.uint8, block.num_rows * ROW_BYTES, BLOCK_DTYPE.itemsize)
            flat[filled : filled + block.num_rows, :ROW_BYTES] = body.reshape(-1, ROW_BYTES)
            filled += block.num_rows
            found.append(block)
        elif _torn(content, place, file.size, block is None or len(content) == length):
            torn = True
            break
        else:
            damaged.append(place)
            if block is None or len(content) < length:
                break
        place += len(content)
    return _journal(rows[:filled], found, tuple(damaged), torn)


def _sound(content: memoryview, block: _Block) -> bool:
    whole = len(content) == block.num_bytes
    return whole and digest(content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]


def _torn(block: memoryview, place: int, size: int, filled: bool) -> bool:
    """Whether a block that is not sound is the last one and was never wholly written.

    Args: filled: the file has all the bytes that the block should have, as far as its header tells.
    """
    if place + len(block) < size:
        return False
    if not filled or len(block) < BLOCK_DTYPE.itemsize:
        return True
    edges = [0, *range(-place % SECTOR_BYTES, len(block), SECTOR_BYTES), len(block)]
    return any(a < b and not any(block[a:b]) for a, b in pairwise(edges))


def _journal(rows: Rows, found: list[_Block], damaged: tuple[int, ...], torn: bool) -> Journal:
    counts = np.array([block.num_rows for block in found], np.int64)
    rows["shard_generation"] = np.repeat(np.array([block.generation for block in found], np.int64), counts)
    rows["shard_number"] = np.repeat(np.array([block.number for block in found], np.int64), counts)
    starts = (np.cumsum(counts) - counts).tolist()
    shards = {(block.generation, block.number): block.shard_rows for block in found}
    spans = {(b.generation, b.number): (start, b.num_rows) for b, start in zip(found, starts, strict=True)}
    return Journal(rows, shards, spans, damaged, torn)


def _head(head: memoryview) -> _Block | None:
    """What a block header says; None for one that is damaged or cut short."""
    if len(head) < BLOCK_DTYPE.itemsize or _check(head).to_bytes(4, "little") != head[-4:]:
        return None
    mark, num_rows, generation, number, shard_rows, _ = _HEAD.unpack(head)
    return _Block(num_rows, generation, number, shard_rows) if mark == MARK else None


def _check(head: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(head[:-4])) & 0xFFFFFFFF


def _bytes_of(rows: Rows) -> npt.NDArray[np.uint8]:
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def _damaged(path: Path, offset: int) -> StoreError:
    return StoreError(f"a journal of version {VERSION} with its digests", f"{path} damaged at offset {offset}", _HINT)
