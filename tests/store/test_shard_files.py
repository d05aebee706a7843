import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.store import shard_files
from headrace.store.shard import shard_name
from headrace.store.shard_files import STAGING_MARK, FolderShards, MappedShards
from headrace.testing.states import fake_record, fake_sample, same_records
from tests.store.conftest import Opens


def expected(row: int):
    return fake_record(row, 1, num_segments=3 if row % 3 == 0 else 1)


@pytest.fixture(params=[FolderShards, MappedShards])
def shards(request: pytest.FixtureRequest, tmp_path: Path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / shard_name(1, 0)).write_bytes(bytes(range(200)))
    return request.param(tmp_path)


def test_a_view_has_the_bytes_asked_for_and_fewer_at_the_end(shards) -> None:
    assert bytes(shards.view((1, 0), 10, 20)) == bytes(range(10, 30))
    assert bytes(shards.view((1, 0), 190, 20)) == bytes(range(190, 200))
    assert len(shards.view((1, 0), 300, 20)) == 0
    with pytest.raises(FileNotFoundError):
        shards.view((1, 1), 0, 1)


def test_an_empty_shard_gives_nothing(shards) -> None:
    (Path(shards.where) / shard_name(1, 0)).write_bytes(b"")
    assert len(shards.view((1, 0), 0, 20)) == 0


def test_a_view_may_be_written_to_and_the_file_stays(shards) -> None:
    path = Path(shards.where) / shard_name(1, 0)
    view = shards.view((1, 0), 0, 4)
    np.frombuffer(view, np.uint8)[:] = 255
    assert path.read_bytes() == bytes(range(200))


def test_a_view_outlives_the_shards_that_gave_it(shards) -> None:
    view = shards.view((1, 0), 5, 5)
    shards.clear()
    assert bytes(view) == bytes(range(5, 10))
    assert bytes(shards.view((1, 0), 0, 2)) == bytes(range(2))


@pytest.mark.parametrize("way", [FolderShards, MappedShards])
def test_a_staging_folder_says_where_its_shards_are(tmp_path: Path, way) -> None:
    (tmp_path / STAGING_MARK).write_text("x")
    assert "store.at" in way(tmp_path).hint


def test_many_threads_with_few_descriptors_read_the_right_bytes(
    make_store, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_MAX_OPEN", 1)
    reader = opened(make_store(10))
    barrier = threading.Barrier(4)

    def work(seed: int) -> bool:
        barrier.wait()
        rows = [random.Random(seed * 100 + k).randrange(10) for k in range(60)]
        return all(same_records(reader.read(row, fake_sample(row).id), expected(row)) for row in rows)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_descriptors_are_bounded_and_closed(make_store, opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_MAX_OPEN", 2)
    reader = opened(make_store(12))
    before = len(os.listdir("/proc/self/fd"))
    for row in range(12):
        reader.read(row, fake_sample(row).id)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before
