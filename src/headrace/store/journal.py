"""The journal: where every record lies, in one file that is read once.

In: index rows of sealed shards. Out: `index.journal`, a header and fixed rows, each with its own digest; appended and
fsynced after its shard is durable, compacted at close. A torn end is no error, damage anywhere else is.
"""

from pathlib import Path

import numpy as np
import xxhash

from headrace.errors import StoreError
from headrace.files import write_atomic
from headrace.store.append import AppendFile
from headrace.store.shard import INDEX_DTYPE, Rows

FILE_NAME = "index.journal"
JOURNAL_DTYPE = np.dtype([*INDEX_DTYPE.descr, ("shard_generation", "<i8"), ("shard_number", "<i8"), ("check", "<u8")])
ROW_BYTES = JOURNAL_DTYPE.itemsize
VERSION = 0
HEADER = b"HRJOURN0" + VERSION.to_bytes(4, "little") + ROW_BYTES.to_bytes(4, "little")
_HINT = "run store repair: it makes the journal anew from the shards"


def journal_rows(index: Rows, generation: int, number: int) -> Rows:
    """Index rows of shard (generation, number) as journal rows, digests filled in."""
    rows = np.zeros(len(index), JOURNAL_DTYPE)
    for name in INDEX_DTYPE.names or ():
        rows[name] = index[name]
    rows["shard_generation"] = generation
    rows["shard_number"] = number
    rows["check"] = _checks(rows.tobytes())
    return rows


def read_journal(path: Path) -> Rows:
    """Every row of a journal, in file order; a torn end is left out, an absent file has none.

    A torn end is a part of a row, or rows of zeros (a file that grew before its content reached the disk).
    Raises: StoreError naming the offset of a damaged header or row.
    """
    rows, good = scan_journal(path)
    if not good.all():
        offset = len(HEADER) + int(np.argmin(good)) * ROW_BYTES
        raise StoreError(
            "a journal row with its digest",
            f"{path} damaged at offset {offset}",
            _HINT,
        )
    return rows


def scan_journal(path: Path) -> tuple[Rows, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Rows of a journal with a bool for each, False where its digest does not match; a torn end is left out.

    Raises: StoreError for a damaged header.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as exc:
        raise StoreError("a readable journal", f"{path}: {exc.strerror}", "remove it, then run store repair") from exc
    if content[: len(HEADER)] != HEADER[: len(content)]:
        raise StoreError(f"a journal of version {VERSION}", f"{path} damaged at offset 0", _HINT)
    body = content[len(HEADER) :]
    rows = np.frombuffer(body[: len(body) // ROW_BYTES * ROW_BYTES], JOURNAL_DTYPE)
    last = len(rows)
    while last and not any(rows[last - 1].tobytes()):
        last -= 1
    rows = rows[:last]
    return rows, rows["check"] == _checks(rows.tobytes())


def append_journal(path: Path, rows: Rows) -> None:
    """Append rows to a journal that ends with a whole row, and make them durable."""
    journal = AppendFile(path)
    try:
        journal.write(rows.tobytes() if journal.num_bytes else HEADER + rows.tobytes())
        journal.sync()
    finally:
        journal.close()


def rewrite_journal(path: Path, rows: Rows) -> None:
    """Replace a journal by one with these rows, atomically."""
    write_atomic(path, HEADER + rows.tobytes())


def _checks(body: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    covered = ROW_BYTES - 8
    view = memoryview(body)
    sums = [xxhash.xxh3_64_intdigest(view[a : a + covered]) for a in range(0, len(body), ROW_BYTES)]
    return np.array(sums, dtype=np.uint64)
