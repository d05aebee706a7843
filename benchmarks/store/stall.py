"""A producer at full speed, a disk that stalls in write and in fsync: memory stays bounded, the producer waits.

In: a folder, MB to write, seconds of each stall. Out: rows of claims, as JSON.

usage: stall.py FOLDER MEGABYTES SECONDS
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from headrace.record import Record, make_record, segment_spans
from headrace.store.queue import RecordQueue
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_sample

MiB = 1024 * 1024
NUM_TOKENS, BYTES_PER_TOKEN = 1000, 5760
QUEUE_BYTES = 256 * MiB


def anonymous() -> int:
    """RssAnon, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def made(row: int, content: bytes) -> Record:
    """A record with bytes of its own, as an encoder would make them."""
    sample = fake_sample(row, NUM_TOKENS)
    spans = segment_spans(NUM_TOKENS, BYTES_PER_TOKEN)
    mine = np.frombuffer(content, np.uint8) ^ np.uint8(row % 256)
    return make_record(sample, spans, [mine.tobytes()], 1)


class Stall:
    """The 20th write and the first fsync after it take their time."""

    def __init__(self, seconds: float) -> None:
        self.real = {"write": os.write, "fsync": os.fsync}
        self.left = {"write": 20, "fsync": 2}
        self.seconds = seconds

    def call(self, name: str, *args):
        self.left[name] -= 1
        if self.left[name] == 0:
            time.sleep(self.seconds)
        return self.real[name](*args)


def main(folder: Path, megabytes: int, seconds: float) -> None:
    """Print the rows."""
    content = np.random.default_rng(0).bytes(NUM_TOKENS * BYTES_PER_TOKEN)
    began = time.monotonic()
    for row in range(40):
        made(row, content)
    speed = 40 * len(content) / (time.monotonic() - began) / 1e6
    stall, peak, done = Stall(seconds), [0], threading.Event()
    before = anonymous()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    num = megabytes * 1_000_000 // len(content)
    with tempfile.TemporaryDirectory(dir=folder) as base:
        with StoreWriter(Path(base), fake_manifest(), 256 * MiB, 1e9) as writer:
            os.write = lambda *args: stall.call("write", *args)
            os.fsync = lambda *args: stall.call("fsync", *args)
            watcher.start()
            with RecordQueue(writer, QUEUE_BYTES) as queue:
                for row in range(num):
                    queue.add(made(row, content))
                waited = queue.waited_s
        done.set()
        watcher.join()
        kept = StoreReader(Path(base)).num_records
    grown = (peak[0] - before) / MiB
    what = f"memory with a queue of 256 MiB and stalls of {seconds:g} s in write and in fsync"
    told = f"{grown:.0f} MiB, {kept} of {num} records stored"
    rows = [
        ("producer alone", "at least 500 MB/s", f"{speed:,.0f} MB/s", speed >= 500),
        (what, "grows by at most 320 MiB", told, grown <= 320 and kept == num),
        ("the producer waits meanwhile", f"at least {seconds:g} s", f"{waited:.1f} s", waited >= seconds),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
