"""Files that only grow: shards being written, the journal, the list of failures.

In: bytes. Out: the same bytes at the end of a file, unbuffered, durable after `sync`. A failed write or fsync raises
StoreError and is never retried: after a failed fsync nobody knows which pages reached the disk.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import StoreError
from headrace.files import fsync_folder


class AppendFile:
    """One file open for appending, created if absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _translated(path, "opened"):
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.num_bytes = os.fstat(self._descriptor).st_size

    def write(self, content: bytes | memoryview) -> None:
        """Append all of `content`. Raises: StoreError, with an unknown part of it written."""
        rest = memoryview(content).cast("B")
        with _translated(self.path, "written"):
            while rest:
                written = os.write(self._fileno(), rest)
                self.num_bytes += written
                rest = rest[written:]

    def truncate(self, num_bytes: int) -> None:
        """Cut off everything after `num_bytes`."""
        with _translated(self.path, "cut"):
            os.ftruncate(self._fileno(), num_bytes)
        self.num_bytes = num_bytes

    def sync(self) -> None:
        """Make what was written durable. Raises: StoreError when the disk says it did not keep it."""
        with _translated(self.path, "made durable"):
            os.fsync(self._fileno())

    def close(self) -> None:
        """Close without making anything durable; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _fileno(self) -> int:
        if self._descriptor is None:
            raise StoreError("an open file", f"{self.path} is closed", "open the store again")
        return self._descriptor


def make_durable_folder(path: Path) -> None:
    """Make a folder that a power cut does not take away, with the folders above it that are not there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in {*(made.parent for made in missing), path.parent, path.parent.parent}:
        fsync_folder(folder)


@contextmanager
def _translated(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        hint = "free space or mend the disk, then run the stage again; it resumes from what is sealed"
        raise StoreError(f"a file that can be {done}", f"{path}: {exc.strerror}", hint) from exc
