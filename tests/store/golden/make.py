"""Write the golden store of the format's version into tests/store/golden/v1: run once a version, never again.

In: nothing. Out: a store with a long record, a superseded one, two shards, a failure and a basis; and `expected.json`,
what every later reader must find in it. usage: python tests/store/golden/make.py
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from headrace.codec.spec import CodecSpec
from headrace.record import digest
from headrace.store.manifest import VERSION
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample

BASIS = b"not a real basis: the store only checks its digest"


def main() -> None:
    """Make the store and what is expected of it."""
    root = Path(__file__).parent / f"v{VERSION}"
    shutil.rmtree(root, ignore_errors=True)
    codec = CodecSpec("raw", 0, 2, 8, "float32", {"basis": digest(BASIS).hex()})
    provenance = {"engine": "fake", "created": "2026-11-30T00:00:00Z"}
    manifest = replace(fake_manifest(codec=codec), provenance=provenance)
    states = root / "states"
    with StoreWriter(states, manifest, 1 << 30, 1e9) as writer:
        for row in (2, 0, 1):
            writer.add(fake_record(row, writer.generation, num_segments=3 if row == 0 else 1, num_tokens=6))
        writer.fail(fake_sample(5, 6).id, 5, "states are not finite", permanent=True)
    with StoreWriter(states, manifest, 1 << 30, 1e9) as writer:
        writer.add(fake_record(1, writer.generation, num_tokens=6))
    (states / "basis.safetensors").write_bytes(BASIS)
    (states / "lock").unlink()
    reader = StoreReader(states)
    records = [reader.read(row, reader.id_of(row)) for row in reader.rows.tolist()]
    expected = {
        "failures": {str(row): failure.reason for row, failure in reader.failures.items()},
        "identity": manifest.identity(),
        "records": [
            {
                "row": record.row,
                "id": record.id.hex(),
                "generation": record.generation,
                "input_ids": record.input_ids.tolist(),
                "loss_mask": record.loss_mask.tolist(),
                "payloads": [segment.payload.hex() for segment in record.segments],
            }
            for record in records
        ],
    }
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
