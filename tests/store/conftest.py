from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record

MakeStore = Callable[..., Path]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Write a store of rows 0..n-1, two records a shard, every third record in three segments."""

    def make(num_records: int = 6, name: str = "states") -> Path:
        root = tmp_path / name
        with StoreWriter(root, fake_manifest(), shard_bytes=1 << 30, shard_seconds=1e9) as writer:
            for row in range(num_records):
                writer.add(fake_record(row, writer.generation, num_segments=3 if row % 3 == 0 else 1))
                if row % 2:
                    writer.seal()
        return root

    return make
