"""How many bytes records take in a store, before they are written.

In: token lengths and a codec's bytes a token, or a record. Out: bytes, and a clear stop where they do not fit into
`store.max_bytes` or on the disk. What was stored until then stays readable, and the next capture goes on from it.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import StoreError
from headrace.record import Record, segment_spans

# More than is measured: framing of a message (about 650 bytes), its rows in the shard's index and in the journal.
SEGMENT_OVERHEAD = 1024
SHARD_OVERHEAD = 4096
TOKEN_OVERHEAD = 5  # its id and its place in the mask


class StoreFull(StoreError):
    """A record that would take a store beyond its budget; it was not written, and the store is sound."""


def record_bytes(record: Record) -> int:
    """At most so many bytes a record adds to a store."""
    return record.num_bytes + TOKEN_OVERHEAD * record.num_tokens + SEGMENT_OVERHEAD * len(record.segments)


def expected_bytes(lengths: Iterable[int], bytes_per_token: float) -> int:
    """At most so many bytes that samples of these lengths take, as far as `bytes_per_token` is exact."""
    payload = overhead = 0.0
    for tokens in lengths:
        payload += tokens * bytes_per_token
        overhead += TOKEN_OVERHEAD * tokens + SEGMENT_OVERHEAD * len(segment_spans(tokens, bytes_per_token))
    return int(payload + overhead) + SHARD_OVERHEAD


def check_room(root: Path, held: int, expected: int, max_bytes: int | None, staged: int | None = None) -> None:
    """Refuse a capture that cannot end, before it begins.

    Args:
        held: bytes the store has now.
        expected: bytes that are still to come.
        staged: bytes that lie in the folder at once; None: all of them.
    Raises: StoreFull when they do not fit into the budget, or on the disk.
    """
    if max_bytes is not None and held + expected > max_bytes:
        found = f"{held + expected:,} bytes: {held:,} stored and {expected:,} to come"
        hint = "raise it, choose a smaller capture.codec, or prepare fewer samples"
        raise StoreFull(f"states within store.max_bytes {max_bytes:,}", found, hint)
    free = shutil.disk_usage(root).free
    needed = expected if staged is None else min(expected, staged)
    if needed > free:
        hint = "free space, choose a smaller capture.codec, or prepare fewer samples"
        raise StoreFull(f"{needed:,} bytes free for states at {root}", f"{free:,}", hint)
