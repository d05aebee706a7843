"""Where a reader takes the bytes of shards from: a folder, by positioned reads or mapped into memory.

In: a shard and a range of it. Out: those bytes. Reads go into memory that is used again when nobody refers to it. A
mapping copies nothing, which is faster from the page cache; but what a failing disk does not give ends the process
(SIGBUS) where a read would have named the record.
"""

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from headrace.store.buffers import ReadBuffers
from headrace.store.shard import Key, shard_name

STAGING_MARK = "owner"  # in a folder from which shards go to an address
_MAX_OPEN = 64
Opened = TypeVar("Opened")


class Shards(Protocol):
    """Where a reader finds shards: a folder or objects. `where` names it in messages, `hint` says how to mend it."""

    where: str
    hint: str

    def view(self, shard: Key, offset: int, length: int) -> memoryview:
        """The bytes from `offset` on; fewer than `length` at the end of the shard.

        Raises: OSError for a shard that is not there, or a disk that does not answer.
        """
        ...

    def names(self) -> set[str]:
        """File names of the shards that are there."""
        ...

    def clear(self) -> None:
        """Release what is open; a later view opens it again."""
        ...


class _InFolder(Generic[Opened]):
    """Open shards of a states folder, least recently used first, at most _MAX_OPEN."""

    hint = "run store repair, then capture again: it makes only the rows that are lost"

    def __init__(self, root: Path, opened: Callable[[Path], Opened]) -> None:
        self._folder = root / "shards"
        self.where = str(self._folder)
        if (root / STAGING_MARK).is_file():
            self.hint = "shards of this folder were moved to store.at: read the states there, or capture without it"
        self._opened = opened
        self._open: OrderedDict[Key, Opened] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> set[str]:
        """File names of the shards that are there."""
        return {path.name for path in self._folder.glob("*.arrow")}

    def clear(self) -> None:
        """Release what is open."""
        with self._lock:
            self._open.clear()

    def _get(self, shard: Key) -> Opened:
        with self._lock:
            found = self._open.pop(shard, None)
            if found is None:
                found = self._opened(self._folder / shard_name(*shard))
            self._open[shard] = found
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return found


class _File:
    """A descriptor that closes when nobody reads from it any more, even if it has left the cache meanwhile."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class FolderShards(_InFolder[_File]):
    """Shards of a states folder, by one positioned read a view; implements `Shards`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, _File)
        self._buffers = ReadBuffers()

    def view(self, shard: Key, offset: int, length: int) -> memoryview:
        """The bytes from `offset` on, in memory of their own; fewer at the end of the file. Raises: OSError."""
        file, buffer = self._get(shard), self._buffers.take(length)
        return buffer[: os.preadv(file.descriptor, [buffer], offset)]

    def clear(self) -> None:
        """Release what is open, and memory that nobody uses."""
        super().clear()
        self._buffers.clear()


class MappedShards(_InFolder[memoryview]):
    """Shards of a states folder, mapped whole; implements `Shards`. Writing to a view does not reach the file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, _map)

    def view(self, shard: Key, offset: int, length: int) -> memoryview:
        """The bytes from `offset` on, where the kernel has them; fewer at the end of the file. Raises: OSError."""
        return self._get(shard)[offset : offset + length]


def _map(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else b"")
    finally:
        os.close(descriptor)
