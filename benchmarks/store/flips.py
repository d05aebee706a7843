"""Flip bits in every region of a store: each flip is detected and its file named, and Arrow parses none of it.

In: a folder, flips a region. Out: rows of claims, as JSON. usage: flips.py FOLDER FLIPS_A_REGION
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.codec.spec import CodecSpec
from headrace.errors import StoreError
from headrace.record import digest
from headrace.store.reader import StoreReader
from headrace.store.shard import TAIL_BYTES, read_provenance, read_trailer
from headrace.store.verify import verify
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record

BASIS = bytes(range(256)) * 4
ROWS = 12
END_OF_STREAM = 8

parsed: list[bytes] = []


def watch_arrow() -> None:
    """Note the digest of whatever Arrow is given to parse."""
    read_batch, open_stream = pa.ipc.read_record_batch, pa.ipc.open_stream

    def batch(message: Any, schema: Any) -> Any:
        parsed.append(digest(memoryview(message)))
        return read_batch(message, schema)

    def stream(source: Any) -> Any:
        parsed.append(b"schema")
        return open_stream(source)

    pa.ipc.read_record_batch, pa.ipc.open_stream = batch, stream


def make(root: Path) -> Path:
    codec = CodecSpec("raw", 0, 2, 8, "float32", {"basis": digest(BASIS).hex()})
    with StoreWriter(root, replace(fake_manifest(), codec=codec), 1 << 30, 1e9) as writer:
        for row in range(ROWS):
            writer.add(fake_record(row, 1, num_segments=1 + row % 3))
        for row in range(20, 24):
            writer.fail(fake_record(row, 1).id, row, "states are not finite", permanent=True)
    (root / "basis.safetensors").write_bytes(BASIS)
    return root


def regions(root: Path) -> Iterator[tuple[str, Path, list[int]]]:
    """Name, file and byte offsets of every region."""
    (shard,) = (root / "shards").glob("*.arrow")
    content, rows = shard.read_bytes(), read_trailer(shard)
    metadata: list[int] = []
    body: list[int] = []
    for offset, length in zip(rows["offset"].tolist(), rows["length"].tolist(), strict=True):
        end = offset + 8 + int.from_bytes(content[offset + 4 : offset + 8], "little")
        metadata += range(offset, end)
        body += range(end, offset + length)
    index = len(content) - TAIL_BYTES - rows.nbytes
    yield "message metadata", shard, metadata
    yield "message body", shard, body
    yield "schema", shard, list(range(int(rows["offset"][0])))
    yield "footer", shard, [*range(index - END_OF_STREAM, index), *range(len(content) - TAIL_BYTES, len(content))]
    yield "mini-index", shard, list(range(index, index + rows.nbytes))
    for name in ("index.journal", "manifest.json", "basis.safetensors", "failures.jsonl"):
        yield name, root / name, list(range((root / name).stat().st_size))


def named(root: Path, path: Path) -> bool:
    """Whether verify says that something is damaged, and names the file."""
    try:
        return any(damage.path == path.name for damage in verify(root))
    except StoreError as exc:
        return path.name in str(exc)


def read_everything(root: Path, shard: Path) -> None:
    """What a run reads; errors of the family are what damage should end in."""
    try:
        reader = StoreReader(root)
        for row in reader.rows.tolist():
            try:
                reader.read(row, reader.id_of(row))
            except StoreError:
                continue
        reader.close()
        read_provenance(shard)
    except StoreError:
        return


def flip_region(root: Path, name: str, path: Path, places: list[int], wanted: int) -> tuple[str, str, str, bool]:
    (shard,) = (root / "shards").glob("*.arrow")
    content, sound = path.read_bytes(), {bytes(row) for row in read_trailer(shard)["digest"]}
    rng = random.Random(name)
    flips = [(place, bit) for place in places for bit in range(8)]
    missed, misparsed, chosen = [], [], rng.sample(flips, min(wanted, len(flips)))
    for place, bit in chosen:
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        parsed.clear()
        if not named(root, path):
            missed.append((place, bit))
        read_everything(root, shard)
        if not set(parsed) <= sound | ({b"schema"} if path != shard or "message" in name else set()):
            misparsed.append((place, bit))
    path.write_bytes(content)
    told = f"{len(chosen)} flips; not named {missed[:4]}, parsed {misparsed[:4]}"
    holds = len(chosen) >= min(wanted, 200) and not missed and not misparsed
    return f"bits flipped in {name}", f"{wanted}, all named, none parsed, no crash", told, holds


def main(folder: Path, wanted: int) -> None:
    """Print the rows."""
    watch_arrow()
    with tempfile.TemporaryDirectory(dir=folder) as base:
        root = make(Path(base) / "states")
        assert verify(root) == []
        rows = [flip_region(root, *region, wanted) for region in regions(root)]
        assert verify(root) == []
        read_everything(root, next((root / "shards").glob("*.arrow")))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
