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
NUM_TOKENS, BYTES_PER_TOKEN = 250, 5760  # the demo's
QUEUE_BYTES = 256 * MiB
ROUNDS, ROUND = 5, 100


def anonymous() -> int:
    """RssAnon, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Producer:
    """An encoder at full speed: records whose bytes are their own, copied from a pool that is there."""

    def __init__(self) -> None:
        self.num_bytes = NUM_TOKENS * BYTES_PER_TOKEN
        self.pool = memoryview(np.random.default_rng(0).bytes(self.num_bytes + 4096))
        self.spans = segment_spans(NUM_TOKENS, BYTES_PER_TOKEN)

    def record(self, row: int) -> Record:
        start = row % 4096
        return make_record(
            fake_sample(row, NUM_TOKENS), self.spans, [bytes(self.pool[start : start + self.num_bytes])], 1
        )

    def speed(self) -> float:
        """MB/s with nobody to wait for, the best of a few rounds: what else runs here must not count."""
        taken = []
        for _ in range(ROUNDS):
            began = time.monotonic()
            for row in range(ROUND):
                self.record(row)
            taken.append(time.monotonic() - began)
        return ROUND * self.num_bytes / min(taken) / 1e6


class Stall:
    """The 40th write and the second fsync take their time."""

    def __init__(self, seconds: float) -> None:
        self.real = {"write": os.write, "fsync": os.fsync}
        self.left = {"write": 40, "fsync": 2}
        self.seconds = seconds
        self.seen: list[str] = []

    def call(self, name: str, *args):
        self.left[name] -= 1
        if self.left[name] == 0:
            time.sleep(self.seconds)
            self.seen.append(name)
        return self.real[name](*args)


def main(folder: Path, megabytes: int, seconds: float) -> None:
    """Print the rows."""
    producer = Producer()
    speed = producer.speed()
    stall, peak, done = Stall(seconds), [0], threading.Event()
    before = anonymous()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    num = megabytes * 1_000_000 // producer.num_bytes
    with tempfile.TemporaryDirectory(dir=folder) as base:
        with StoreWriter(Path(base), fake_manifest(), 256 * MiB, 1e9) as writer:
            os.write = lambda *args: stall.call("write", *args)
            os.fsync = lambda *args: stall.call("fsync", *args)
            watcher.start()
            with RecordQueue(writer, QUEUE_BYTES) as queue:
                for row in range(num):
                    queue.add(producer.record(row))
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
        ("stalls that happened", "write, fsync", ", ".join(stall.seen), stall.seen == ["write", "fsync"]),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
