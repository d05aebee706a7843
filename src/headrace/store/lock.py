"""One writer a store.

In: a states folder. Out: an exclusive `flock` on its `lock` file for as long as this process lives, or StoreError
naming the process that holds it. The kernel releases it when the holder dies; the file itself means nothing.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import StoreError

FILE_NAME = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_held: "weakref.WeakSet[StoreLock]" = weakref.WeakSet()


class StoreLock:
    """Held from construction until `release`, and never by a forked child."""

    def __init__(self, root: Path) -> None:
        """Raises: StoreError at once when another process, or this one, holds it."""
        self._path = root / FILE_NAME
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(self._descriptor, 4096, 0).decode("utf-8", "replace") or "an unknown process"
            self.release()
            hint = "wait for that writer or stop it; the lock goes with its process"
            raise StoreError(f"to be the only writer of {root}", f"it is held by {holder}", hint) from exc
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"pid": os.getpid(), "boot_id": boot_id()}).encode())
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._descriptor is not None

    def release(self) -> None:
        """Give it up; safe to call twice."""
        if self._descriptor is not None:
            # Closing, not unlocking: in a forked child an unlock would free the parent's lock too.
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn what the disk refuses, while a store is written, into a StoreError."""
    try:
        yield
    except OSError as exc:
        hint = "check space and rights, then run it again"
        raise StoreError(f"a folder that can be written at {root}", str(exc), hint) from exc


def boot_id() -> str:
    """This boot of this machine; `unknown` where the kernel does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
