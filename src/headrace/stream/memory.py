"""Freed memory of messages, used again instead of given back.

In: nothing. Out: an allocator that keeps what was freed for the next message of the same size. glibc gives pieces of a
megabyte back to the kernel, which clears every page of the next one: a third of a reader's work, measured.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_MIB = 1024 * 1024
_MMAP_BYTES = 8 * _MIB  # what is larger comes from the kernel and goes back to it
_KEPT_BYTES = 32 * _MIB  # most that is kept, of each of glibc's arenas
_ARENAS = 2  # each thread may have its own by default


def reuse_freed() -> bool:
    """Keep freed memory in this process. Returns: whether the allocator is glibc's, and does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, _ARENAS), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_MMAP_THRESHOLD, _MMAP_BYTES))
    done = [mallopt(name, value) for name, value in settings]
    return all(done)
