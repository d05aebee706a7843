"""Read samples shuffled and in order: our store, plain pread, and one safetensors file a sample.

In: a folder, gigabytes. Out: rows of claims, as JSON. All three give the same bytes of raw states, page cache warm,
turn by turn; medians of the turns. pread reads a record's bytes into one buffer that is used again and checks nothing;
our source reads with its usual two threads and checks every digest; the rival's files are loaded as speculators loads
them (safetensors' load_file), ids and states.

usage: throughput.py FOLDER GIGABYTES
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.record import Record, make_record, segment_spans
from headrace.source import Position
from headrace.store.folder_source import FolderSource
from headrace.store.shard import shard_name
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_sample

TAPS, HIDDEN = 5, 576  # the demo's
BYTES_PER_TOKEN = TAPS * HIDDEN * 2
TURNS = 3


class Stores:
    """The same samples three times."""

    def __init__(self, base: Path, num_tokens: int, num_bytes: int) -> None:
        self.base, self.num_tokens = base, num_tokens
        self.rows = range(max(8, num_bytes // (num_tokens * BYTES_PER_TOKEN)))
        spans = segment_spans(num_tokens, BYTES_PER_TOKEN)
        rng = np.random.default_rng(0)
        with StoreWriter(base / "states", fake_manifest(), 256 << 20, 1e9) as writer:
            for row in self.rows:
                payload = rng.bytes(num_tokens * BYTES_PER_TOKEN)
                parts = [payload[a * BYTES_PER_TOKEN : b * BYTES_PER_TOKEN] for a, b in spans]
                sample = fake_sample(row, num_tokens)
                writer.add(make_record(sample, spans, parts, 1))
                states = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(num_tokens, TAPS, HIDDEN)
                ids = torch.from_numpy(sample.input_ids.astype(np.int64))
                save_file({"hidden_states": states, "token_ids": ids}, base / f"hs_{row}.safetensors")
        self.ids = [fake_sample(row, num_tokens).id for row in self.rows]
        self.source = FolderSource(base / "states", read_ahead=8)
        self.places = {int(entry["row"]): [] for entry in self.source.reader.entries()}
        for entry in self.source.reader.entries():
            name = shard_name(int(entry["shard_generation"]), int(entry["shard_number"]))
            self.places[int(entry["row"])].append((name, int(entry["offset"]), int(entry["length"])))
        self.files = {p.name: os.open(p, os.O_RDONLY) for p in (base / "states" / "shards").iterdir()}
        self.buffer = memoryview(bytearray(64 << 20))

    def ours(self, order: Sequence[int]) -> int:
        positions = (Position(0, place, row, self.ids[row]) for place, row in enumerate(order))
        total = 0
        for record in self.source.records(positions):
            assert isinstance(record, Record)
            total += record.num_bytes
        return total

    def plain(self, order: Sequence[int]) -> int:
        total = 0
        for row in order:
            for name, offset, length in self.places[row]:
                total += os.preadv(self.files[name], [self.buffer[:length]], offset)
        return total

    def rival(self, order: Sequence[int]) -> int:
        total = 0
        for row in order:
            loaded = load_file(self.base / f"hs_{row}.safetensors")
            states = loaded["hidden_states"]
            states[::1, ::1, ::256].sum()  # load_file maps the file: touch every page, as a copy to a batch would
            total += states.numel() * states.element_size()
        return total


def speeds(stores: Stores, order: Sequence[int]) -> dict[str, float]:
    """Samples a second of each, medians of turns taken one after the other."""
    ways: dict[str, Callable[[Sequence[int]], int]] = {
        "ours": stores.ours, "plain": stores.plain, "rival": stores.rival
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way(order)
            if turn:  # the first one warms the cache
                taken[name].append(time.perf_counter() - began)
    return {name: len(order) / statistics.median(seconds) for name, seconds in taken.items()}


def main(folder: Path, gigabytes: float) -> None:
    """Print the rows."""
    torch.set_num_threads(1)
    rows = []
    for num_tokens in (250, 800):
        with tempfile.TemporaryDirectory(dir=folder) as base:
            stores = Stores(Path(base), num_tokens, int(gigabytes * 1e9))
            shuffled = random.Random(0).sample(stores.rows, len(stores.rows))
            for name, order in (("shuffled", shuffled), ("in order", list(stores.rows))):
                found = speeds(stores, order)
                size = num_tokens * BYTES_PER_TOKEN
                share, gain = found["ours"] / found["plain"], found["ours"] / found["rival"]
                what = f"{name}, {len(order)} samples of {num_tokens} tokens ({size / 1e6:.2f} MB)"
                told = f"{share:.2f}: {found['ours'] * size / 1e9:.2f} of {found['plain'] * size / 1e9:.2f} GB/s"
                rows.append(
                    (f"reading {what}, digests checked, over plain pread", "at least 0.75", told, share >= 0.75)
                )
                told = f"{gain:.2f}: {found['ours']:,.0f} and {found['rival']:,.0f} samples/s"
                rows.append((f"the same over one safetensors file a sample, {name}", "at least 3", told, gain >= 3))
            stores.source.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
