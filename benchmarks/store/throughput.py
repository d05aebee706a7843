"""Read samples shuffled and in order: our store, plain pread, and speculators with its file a sample.

In: a folder, gigabytes, the python of an environment with speculators 0.9.0. Out: rows of claims, as JSON. All three
read the same raw states, page cache warm, turn by turn; medians of the turns. pread reads a record's bytes into
one buffer that is used again and checks nothing, with one thread; our source reads or maps shards with its usual two
threads, checks every digest and gives features, ids and mask as tensors; the rival is its own ArrowDataset in its own
process (rival.py), with one thread or with two, whichever was faster.

usage: throughput.py FOLDER GIGABYTES [RIVAL_PYTHON]
"""

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from headrace.codec.base import RawCodec, record_features
from headrace.codec.spec import CodecSpec
from headrace.record import Record, make_record, segment_spans
from headrace.source import Position
from headrace.store.folder_source import FolderSource
from headrace.store.reader import StoreReader
from headrace.store.shard_files import MappedShards
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_sample

TAPS, HIDDEN = 5, 576  # the demo's
BYTES_PER_TOKEN = TAPS * HIDDEN * 2
TURNS = 5
READ_AHEAD = 64  # the default of train.read_ahead
HOW = {"read": "reading", "mapped": "mapping (train.map_shards)"}


class Rival:
    """speculators' dataset in its own process; without one, nothing is compared with it."""

    def __init__(self, python: str, base: Path) -> None:
        command = [python, str(Path(__file__).parent / "rival.py"), str(base)]
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
        )
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the rival has ended: run benchmarks/store/rival.py by hand"

    def read(self, order: Sequence[int], threads: int) -> float:
        self.process.stdin.write(f"{threads} {json.dumps(order)}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Stores:
    """The same samples twice."""

    def __init__(self, base: Path, num_tokens: int, num_bytes: int) -> None:
        self.rows = range(max(8, num_bytes // (num_tokens * BYTES_PER_TOKEN)))
        spans = segment_spans(num_tokens, BYTES_PER_TOKEN)
        rng = np.random.default_rng(0)
        samples = [fake_sample(row, num_tokens) for row in self.rows]
        (base / "hidden_states").mkdir()
        np.save(base / "ids.npy", np.stack([sample.input_ids for sample in samples]).astype(np.int64))
        with StoreWriter(base / "states", fake_manifest(), 256 << 20, 1e9) as writer:
            for sample in samples:
                bits = rng.integers(0, 0x3F80, num_tokens * TAPS * HIDDEN, dtype=np.uint16)  # finite in bfloat16
                payload = memoryview(bits).cast("B")
                parts = [payload[a * BYTES_PER_TOKEN : b * BYTES_PER_TOKEN] for a, b in spans]
                writer.add(make_record(sample, spans, parts, 1))
                states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(num_tokens, TAPS, HIDDEN)
                ids = torch.from_numpy(sample.input_ids.astype(np.int64))
                save_file(
                    {"hidden_states": states, "token_ids": ids}, base / "hidden_states" / f"hs_{sample.row}.safetensors"
                )
        self.ids = [sample.id for sample in samples]
        self.codec = RawCodec(CodecSpec("raw", 0, TAPS, HIDDEN, "bfloat16"))
        states = base / "states"
        readers = {"read": StoreReader(states), "mapped": StoreReader(states, MappedShards(states))}
        self.sources = {way: FolderSource(reader, READ_AHEAD) for way, reader in readers.items()}
        self.places: dict[int, list[tuple[tuple[int, int], int, int]]] = {row: [] for row in self.rows}
        names = readers["read"].entries()
        for row, *place in zip(
            *(names[k].tolist() for k in ("row", "shard_generation", "shard_number", "offset", "length")), strict=True
        ):
            self.places[row].append(((place[0], place[1]), place[2], place[3]))
        shards = sorted((base / "states" / "shards").iterdir())
        self.files = {(1, number): os.open(path, os.O_RDONLY) for number, path in enumerate(shards)}
        self.buffer = memoryview(bytearray(64 << 20))

    def ours(self, way: str, order: Sequence[int]) -> float:
        positions = (Position(0, place, row, self.ids[row]) for place, row in enumerate(order))
        began = time.perf_counter()
        for record in self.sources[way].records(positions):
            assert isinstance(record, Record)
            given = record_features(record, self.codec), record.input_ids, record.loss_mask
            assert len(given[0]) == len(given[1])
        return time.perf_counter() - began

    def plain(self, order: Sequence[int]) -> float:
        began = time.perf_counter()
        for row in order:
            for shard, offset, length in self.places[row]:
                os.preadv(self.files[shard], [self.buffer[:length]], offset)
        return time.perf_counter() - began

    def close(self) -> None:
        for source in self.sources.values():
            source.close()
        for descriptor in self.files.values():
            os.close(descriptor)


def speeds(stores: Stores, rival: Rival | None, order: Sequence[int]) -> dict[str, float]:
    """Samples a second of each, medians of turns taken one after the other."""
    ways: dict[str, Callable[[Sequence[int]], float]] = {"plain": stores.plain}
    ways |= {way: functools.partial(stores.ours, way) for way in stores.sources}
    if rival is not None:
        ways |= {f"rival{threads}": lambda order, threads=threads: rival.read(order, threads) for threads in (1, 2)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            seconds = way(order)
            if turn:  # the first one warms the cache
                taken[name].append(seconds)
    return {name: len(order) / statistics.median(seconds) for name, seconds in taken.items()}


def judged(way: str, what: str, size: int, found: dict[str, float]) -> list[tuple[str, str, str, bool]]:
    """A way's rows: over plain pread, and over the rival."""
    share = found[way] / found["plain"]
    told = f"{share:.2f}: {found[way] * size / 1e9:.2f} of {found['plain'] * size / 1e9:.2f} GB/s"
    first = (f"{HOW[way]}, {what}, digests checked, over plain pread", "at least 0.75", told, share >= 0.75)
    if "rival1" not in found:
        return [first, ("the same over speculators' files", "at least 3", "no RIVAL python", False)]
    theirs = max(found["rival1"], found["rival2"])
    told = f"{found[way] / theirs:.2f}: {found[way]:,.0f} and {theirs:,.0f} samples/s"
    return [first, ("the same over speculators' files", "at least 3", told, found[way] >= 3 * theirs)]


def main(folder: Path, gigabytes: float, python: str | None) -> None:
    """Print the rows."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for num_tokens in (250, 800):
        with tempfile.TemporaryDirectory(dir=folder) as base:
            stores = Stores(Path(base), num_tokens, int(gigabytes * 1e9))
            rival = None if python is None else Rival(python, Path(base))
            shuffled = random.Random(0).sample(stores.rows, len(stores.rows))
            for name, order in (("shuffled", shuffled), ("in order", list(stores.rows))):
                found = speeds(stores, rival, order)
                size = num_tokens * BYTES_PER_TOKEN
                what = f"{name}, {len(order)} samples of {num_tokens} tokens ({size / 1e6:.2f} MB)"
                rows += [row for way in stores.sources for row in judged(way, what, size, found)]
            stores.close()
            if rival is not None:
                rival.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if sys.argv[3:] else None)
