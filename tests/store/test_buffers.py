import gc
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from headrace.store.buffers import SMALL_BYTES, ReadBuffers

SIZE = 300_000


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    buffers = ReadBuffers()
    first = buffers.take(SIZE)
    where = address(first)
    second = buffers.take(SIZE)
    assert address(second) != where
    del first
    assert buffers.free_bytes >= SIZE
    assert address(buffers.take(SIZE - 1000)) == where


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[1000:2000],
        lambda view: np.frombuffer(view[8:16], np.int64),
        lambda view: np.frombuffer(view, np.uint8)[5:][::2],
        lambda view: torch.frombuffer(view[:800], dtype=torch.bfloat16).view(2, 200)[1],
        lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)).view(torch.int16),
        lambda view: pa.py_buffer(view[:80]).slice(8),
    ],
)
def test_whatever_was_made_from_a_buffer_keeps_it(derive) -> None:
    buffers = ReadBuffers()
    view = buffers.take(SIZE)
    where = address(view)
    kept = derive(view)
    del view
    gc.collect()
    assert buffers.free_bytes == 0
    other = buffers.take(SIZE)
    assert address(other) != where
    del kept
    assert address(buffers.take(SIZE)) == where


def test_a_buffer_that_is_much_too_large_stays_for_larger_reads() -> None:
    buffers = ReadBuffers()
    buffers.take(8 * SIZE)
    buffers.take(SIZE)
    assert buffers.free_bytes >= 9 * SIZE


def test_what_is_kept_for_later_is_bounded() -> None:
    buffers = ReadBuffers(free_bytes=4 * SIZE)
    held = [buffers.take(SIZE) for _ in range(20)]
    held.clear()
    assert 2 * SIZE <= buffers.free_bytes <= 4 * SIZE
    buffers.clear()
    assert buffers.free_bytes == 0


def test_small_reads_take_memory_of_their_own() -> None:
    buffers = ReadBuffers()
    assert len(buffers.take(SMALL_BYTES - 1)) == SMALL_BYTES - 1
    assert len(buffers.take(0)) == 0
    assert buffers.free_bytes == 0


def test_threads_never_share_a_buffer() -> None:
    buffers = ReadBuffers()
    wrong: list[int] = []

    def use(number: int) -> None:
        for turn in range(300):
            view = buffers.take(SIZE + 1000 * (turn % 7))
            array = np.frombuffer(view, np.uint8)
            array[::4096] = number
            if not (array[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
