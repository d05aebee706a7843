import os
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.budget import StoreFull, record_bytes
from headrace.store.queue import RecordQueue
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def open_writer(root: Path, **changes) -> StoreWriter:
    return StoreWriter(root, fake_manifest(), **{"shard_bytes": 1 << 30, "shard_seconds": 1e9, **changes})


def fill(queue: RecordQueue) -> None:
    for row in range(100):
        queue.add(fake_record(row, 1))


def test_many_producers_lose_and_double_nothing(tmp_path: Path) -> None:
    with open_writer(tmp_path, shard_bytes=20_000) as writer, RecordQueue(writer, 5_000) as queue:

        def produce(first: int) -> None:
            for row in range(first, 200, 5):
                queue.add(fake_record(row, 1))

        threads = [threading.Thread(target=produce, args=(k,)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reader = StoreReader(tmp_path)
    assert reader.rows.tolist() == list(range(200))
    assert same_records(reader.read(77, fake_sample(77).id), fake_record(77, 1))
    assert not [t for t in threading.enumerate() if t.name == "headrace-write"]


def test_a_stalled_disk_makes_producers_wait_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = os.write

    def stalled(descriptor: int, content: bytes) -> int:
        go.wait()
        return real(descriptor, content)

    size = record_bytes(fake_record(0, 1))
    with open_writer(tmp_path) as writer, RecordQueue(writer, 4 * size) as queue:
        monkeypatch.setattr(os, "write", stalled)
        done: list[int] = []

        def produce() -> None:
            for row in range(20):
                queue.add(fake_record(row, 1))
                done.append(row)

        producer = threading.Thread(target=produce)
        producer.start()
        time.sleep(0.3)
        assert done == [0, 1, 2, 3]
        assert queue.held_bytes == 4 * size
        go.set()
        producer.join()
        queue.flush()
        assert queue.held_bytes == 0
        assert queue.waited_s > 0.2
    assert StoreReader(tmp_path).num_records == 20


def test_a_record_larger_than_the_queue_passes(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer, RecordQueue(writer, 1) as queue:
        for row in range(5):
            queue.add(fake_record(row, 1))
    assert StoreReader(tmp_path).num_records == 5


def test_the_writer_s_error_reaches_producers_and_close(tmp_path: Path) -> None:
    with open_writer(tmp_path, max_bytes=20_000) as writer:
        queue = RecordQueue(writer, 4_000)
        with pytest.raises(StoreFull):
            fill(queue)
        with pytest.raises(StoreFull):
            queue.add(fake_record(50, 1))
        with pytest.raises(StoreFull):
            queue.flush()
        with pytest.raises(StoreFull):
            queue.close()
    assert 0 < StoreReader(tmp_path).num_records < 100


def test_the_first_error_is_told(tmp_path: Path) -> None:
    def run() -> None:
        with open_writer(tmp_path) as writer, RecordQueue(writer, 4_000) as queue:
            queue.add(fake_record(0, 7))  # of another generation
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_closed_queue_takes_nothing(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        queue = RecordQueue(writer, 4_000)
        queue.close()
        queue.close()
        with pytest.raises(StoreError, match="open queue"):
            queue.add(fake_record(0, 1))


def test_an_old_shard_is_sealed_while_nobody_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.store.queue._IDLE_SECONDS", 0.02)
    with open_writer(tmp_path, shard_seconds=0.1) as writer, RecordQueue(writer, 4_000) as queue:
        queue.add(fake_record(0, 1))
        queue.flush()
        deadline = time.monotonic() + 5
        while 0 not in writer.committed and time.monotonic() < deadline:
            time.sleep(0.02)
        assert 0 in writer.committed
