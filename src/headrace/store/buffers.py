"""Memory for reads, used again as soon as nothing refers to what was read into it.

In: a length. Out: a writable memoryview of that many bytes. Every view, array and tensor made from it keeps it: only
when the last of them is gone does the memory return, to be handed out for another read. New memory would cost more
than the read itself, because the kernel clears each of its pages first.
"""

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 128 * 1024  # below it the allocator itself uses memory again
FREE_BYTES = 128 * 1024 * 1024  # what is kept for later reads, at most

Backing = npt.NDArray[np.uint8]


class ReadBuffers:
    """Buffers of any size; from any number of threads."""

    def __init__(self, free_bytes: int = FREE_BYTES) -> None:
        """Args: free_bytes: most bytes that are kept while nobody uses them."""
        self._most_free = free_bytes
        self._free: list[Backing] = []  # smallest first
        # Filled by finalizers, which may run anywhere, also while the lock is held: a deque needs none.
        self._returned: deque[Backing] = deque()
        self._lock = threading.Lock()

    def take(self, length: int) -> memoryview:
        """`length` bytes of undefined content."""
        if length < SMALL_BYTES:
            return memoryview(bytearray(length))
        with self._lock:
            self._collect()
            k = bisect_left(self._free, length, key=len)
            fits = k < len(self._free) and len(self._free[k]) <= 2 * length
            backing = self._free.pop(k) if fits else None
        if backing is None:
            step = 1 << (length.bit_length() - 3)  # few sizes, so that most fit again, and at most a quarter too much
            backing = np.empty(-(-length // step) * step, np.uint8)
        # The memoryview refers to this view of the backing, not to the backing: its end is the end of the use.
        lease = backing[:length]
        weakref.finalize(lease, self._returned.append, backing).atexit = False
        return lease.data

    def clear(self) -> None:
        """Give up what nobody uses."""
        with self._lock:
            self._returned.clear()
            self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for later reads now."""
        with self._lock:
            self._collect()
            return sum(map(len, self._free))

    def _collect(self) -> None:
        while self._returned:
            insort(self._free, self._returned.popleft(), key=len)
        while sum(map(len, self._free)) > self._most_free:
            self._free.pop()
