"""A store of 913,786 records in 10,000 shards: how soon it is open, how much memory it takes, what a record costs.

In: a folder, records, shards. Out: rows of claims, as JSON. The store's bytes are made from one message of the real
writer with its numbers put in place, which is quick; the real reader and writer then open it and check its digests.

usage: scale.py FOLDER RECORDS SHARDS
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from headrace.record import SCHEMA, Segment, digest, make_record, segment_to_message
from headrace.store import journal
from headrace.store.shard import END_OF_STREAM, INDEX_DTYPE, MAGIC, _check, shard_name
from headrace.testing.states import fake_manifest, fake_sample

ROW, ID = 0x1122334455667788, bytes(range(100, 116))
PAYLOAD_BYTES, NUM_TOKENS = 1024, 16

FIRST_BATCH = """
import random, sys, time
from pathlib import Path
from headrace.store.reader import StoreReader
began = time.monotonic()
reader = StoreReader(Path(sys.argv[1]))
opened = time.monotonic() - began
rng = random.Random(int(sys.argv[2]))
rows = reader.rows
batch = [reader.read(row, reader.id_of(row)) for row in (int(rows[rng.randrange(len(rows))]) for _ in range(64))]
assert len(batch) == 64 and all(record.num_bytes == 1024 for record in batch)
status = open("/proc/self/status").read()
told = [line.split()[1] for line in status.splitlines() if line[:7] in ("RssAnon", "VmHWM:\\t")]
print(opened, reader.num_records, *told)
assert "torch" not in sys.modules
"""
RESUME = """
import sys, time
from pathlib import Path
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest
began = time.monotonic()
writer = StoreWriter(Path(sys.argv[1]), fake_manifest(), 1 << 30, 1e9)
print(time.monotonic() - began, writer.notes)
writer._lock.release()
"""


def template() -> tuple[np.ndarray, int, int]:
    """A message of the real writer, and where its row and id lie."""
    sample = fake_sample(0, NUM_TOKENS)
    payload = np.random.default_rng(0).bytes(PAYLOAD_BYTES)
    made = make_record(sample, [(0, NUM_TOKENS)], [payload], 1).segments[0]
    segment = Segment(ROW, ID, 1, 0, 1, 0, made.input_ids, made.loss_mask, payload)
    message = bytes(segment_to_message(segment))
    row = ROW.to_bytes(8, "little")
    assert message.count(row) == message.count(ID) == 1
    return np.frombuffer(message, np.uint8), message.index(row), message.index(ID)


def build(root: Path, num_records: int, num_shards: int) -> None:
    """The store, its rows in a shuffled order as capture leaves them."""
    (root / "shards").mkdir(parents=True)
    fake_manifest().write(root)
    message, row_at, id_at = template()
    schema = bytes(SCHEMA.serialize())
    order = np.random.default_rng(1).permutation(num_records)
    with open(root / journal.FILE_NAME, "wb") as listed:
        listed.write(journal.HEADER)
        for number, rows in enumerate(np.array_split(order, num_shards)):
            content = np.tile(message, (len(rows), 1))
            content[:, row_at : row_at + 8] = rows.astype("<i8")[:, None].view(np.uint8)
            ids = np.zeros((len(rows), 16), np.uint8)
            ids[:, :8] = rows.astype("<i8")[:, None].view(np.uint8)
            content[:, id_at : id_at + 16] = ids
            index = np.zeros(len(rows), INDEX_DTYPE)
            index["row"], index["id"] = rows, ids.view("V16")[:, 0]
            index["generation"], index["num_segments"], index["length"] = 1, 1, len(message)
            index["offset"] = len(schema) + len(message) * np.arange(len(rows))
            index["digest"] = [np.void(digest(one)) for one in content]
            index["tokens"], index["trained"] = NUM_TOKENS, NUM_TOKENS // 2
            tail = index.nbytes.to_bytes(8, "little") + digest(schema) + digest(index.tobytes())
            with open(root / "shards" / shard_name(1, number), "wb") as shard:
                shard.write(b"".join((schema, content.tobytes(), END_OF_STREAM, index.tobytes())))
                shard.write(tail + _check(tail) + MAGIC)
            listed.write(journal.block(index, 1, number, len(index)))


def timed(code: str, root: Path, seed: int) -> tuple[float, list[str]]:
    """Seconds from the start of a process to its end, and the words it printed."""
    shell = "import subprocess, sys, time; began = time.monotonic(); out = subprocess.run(sys.argv[1:], check=True, "
    shell += "capture_output=True, text=True).stdout; print(time.monotonic() - began, out)"
    done = subprocess.run(
        [sys.executable, "-c", shell, sys.executable, "-c", code, str(root), str(seed)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    words = done.stdout.split()
    return float(words[0]), words[1:]


def forget_pages(root: Path) -> None:
    """Put the store out of the page cache."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main(folder: Path, num_records: int, num_shards: int) -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory(dir=folder) as base:
        root = Path(base) / "states"
        build(root, num_records, num_shards)
        total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        forget_pages(root)
        cold = timed(FIRST_BATCH, root, 0)[0]
        warm = [timed(FIRST_BATCH, root, seed) for seed in range(1, 6)]
        resume = [timed(RESUME, root, 0)[1] for _ in range(3)]
        notes = re.sub(r"^\[\]$", "", " ".join(resume[0][1:]))
    seconds = statistics.median(took for took, _ in warm)
    opened = statistics.median(float(words[0]) for _, words in warm)
    peak, anon = (max(int(words[k]) for _, words in warm) / 1000 for k in (2, 3))
    resumed = statistics.median(float(words[0]) for words in resume)
    size = f"{num_records:,} records of {PAYLOAD_BYTES} B, {num_shards:,} shards"
    overhead = total / num_records - PAYLOAD_BYTES
    bare = 5 * NUM_TOKENS
    first = f"process start to a first batch of 64 random rows, {size}"
    scanned = resumed <= 1 and not notes
    rows = [  # wall times, on a machine that may be shared
        (first, "at most 1 s warm", f"{seconds:.2f} s (cold {cold:.2f} s)", seconds <= 1),
        ("opening a reader with that many shards", "at most 1 s", f"{opened:.2f} s", opened <= 1),
        ("resume scan: opening a writer", "at most 1 s, nothing to mend", f"{resumed:.2f} s{notes}", scanned),
        (
            "RssAnon of that reader, no torch",
            "at most 300 MB",
            f"{anon:.0f} MB (peak, all: {peak:.0f} MB)",
            anon <= 300,
        ),
        ("overhead of a record", "told", f"{overhead:.0f} B, of them {bare} B ids and mask", True),
        ("records found", f"{num_records:,}", f"{int(warm[0][1][1]):,}", int(warm[0][1][1]) == num_records),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
