"""What a store holds, as plain values to print.

In: a reader, or segments of a record. Out: dictionaries of JSON values, one a record or failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from headrace.record import Segment
from headrace.store.reader import StoreReader
from headrace.store.shard import shard_name


def list_records(reader: StoreReader) -> Iterator[dict[str, Any]]:
    """The newest record of every row, by row. No shard is opened."""
    entries = reader.entries()
    starts = np.flatnonzero(entries["segment"] == 0)
    for start, end in zip(starts.tolist(), np.append(starts, len(entries))[1:].tolist(), strict=True):
        mine = entries[start:end]
        yield {
            "row": int(mine["row"][0]),
            "id": bytes(mine["id"][0]).hex(),
            "generation": int(mine["generation"][0]),
            "num_segments": len(mine),
            "num_tokens": int(mine["tokens"].sum()),
            "num_trained": int(mine["trained"].sum()),
            "num_bytes": int(mine["length"].sum()),
            "shard": shard_name(int(mine["shard_generation"][0]), int(mine["shard_number"][0])),
        }


def list_failures(reader: StoreReader) -> Iterator[dict[str, Any]]:
    """Rows that failed and have no record, by row."""
    yield from (asdict(failure) for row, failure in sorted(reader.failures.items()) if row not in reader)


def describe(segments: Sequence[Segment]) -> dict[str, Any]:
    """One record, or some segments of it, without the encoded states themselves."""
    ids = np.concatenate([segment.input_ids for segment in segments])
    mask = np.concatenate([segment.loss_mask for segment in segments])
    return {
        "row": segments[0].row,
        "id": segments[0].id.hex(),
        "generation": segments[0].generation,
        "segments": [segment.segment for segment in segments],
        "num_segments": segments[0].num_segments,
        "token_start": segments[0].token_start,
        "num_tokens": len(ids),
        "payload_bytes": sum(len(segment.payload) for segment in segments),
        "input_ids": ids.tolist(),
        "loss_mask": mask.tolist(),
    }
