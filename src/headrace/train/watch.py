"""How ranks learn of each other's end, whatever their main threads wait for.

In: the key-value store that the ranks met at. Out: a cause, in words, on every rank within DEAD_S when one of them
fails or falls silent. A thread of each rank counts up a beat. The first rank reads all beats, the others read the
first's, so work grows with the ranks and not with their square. A rank that fails says why before it leaves. Another
thread minds requests that never return: the process that holds the store may be stopped, not gone. A main thread that
cannot be reached, because it waits inside a collective, is ended with the cause on stderr: what it would
have gone on to compute was lost with the dead rank anyhow, and checkpoints are whole or absent.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from headrace.errors import TrainError

BEAT_S = 1.0
DEAD_S = 15.0  # a rank that did not beat for so long is dead
GRACE_S = 3.0  # what a main thread has to leave by itself once the cause is known
_PATIENCE_S = 8.0  # of one request to the store
_FAILED = "failed"


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a key, waiting for it."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read several keys at once."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""
        ...

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Bound the wait of one request."""
        ...


class Watch:
    """Beats and listens from `start` to `stop`; `cause` is None while all is well."""

    def __init__(self, store: Store, rank: int, size: int, end: Callable[[str], None] | None = None) -> None:
        """Args: end: what ends a main thread that does not leave; the default writes the cause and exits."""
        self._store, self._rank, self._size = store, rank, size
        self._end = end if end is not None else _exit
        self._stopped = threading.Event()
        self._known = threading.Event()
        self._beats = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked = time.monotonic()
        self._asked: float | None = None  # when the beat that is on its way set out
        self.cause: str | None = None
        store.set_timeout(timedelta(seconds=_PATIENCE_S))
        store.set(self._key(rank), "0")
        self._thread = threading.Thread(target=self._run, name="headrace-watch", daemon=True)
        self._minder = threading.Thread(target=self._mind, name="headrace-mind", daemon=True)

    def start(self) -> None:
        """Begin; every rank must have made its Watch, whose first beat the others read."""
        self._looked = time.monotonic()
        self._thread.start()
        self._minder.start()

    def stop(self) -> None:
        """Say nothing more, and mind nothing more; safe to call twice."""
        self._stopped.set()
        for thread in (self._minder, self._thread):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(_PATIENCE_S + BEAT_S)

    def fail(self, why: str) -> None:
        """Tell the others that this rank leaves, and why; the first to say so is heard."""
        self._stopped.set()
        saying = threading.Thread(target=self._say, args=(why,), name="headrace-say", daemon=True)
        saying.start()
        saying.join(_PATIENCE_S)

    def why(self, otherwise: str) -> str:
        """Wait for the cause of a broken collective, at most until a silent rank counts as dead."""
        self._known.wait(DEAD_S + _PATIENCE_S)
        return self.cause or otherwise

    def _say(self, why: str) -> None:
        try:
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, f"rank {self._rank} ended: {why}")
        except RuntimeError:  # the store is gone, and with it whoever held it
            return
        time.sleep(2 * BEAT_S)  # where this rank holds the store, the others must read it first

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._asked = time.monotonic()
            try:
                cause = self._look()
            except RuntimeError as exc:
                cause = f"the ranks' meeting point does not answer, so its process is gone ({_first_line(exc)})"
            self._asked = None
            if cause is not None:
                self._tell(cause)
                return

    def _mind(self) -> None:
        """End this rank where a beat does not come back, unless it was this process itself that was stopped."""
        awake = before = time.monotonic()
        while not self._stopped.wait(BEAT_S) and not self._known.is_set():
            now, asked = time.monotonic(), self._asked
            awake, before = (now if now - before > DEAD_S / 2 else awake), now
            if asked is not None and now - max(asked, awake) > DEAD_S:
                silent = f"the ranks' meeting point does not answer for {DEAD_S:.0f} s"
                self._tell(f"{silent}: its process, or its machine, is stopped")

    def _tell(self, cause: str) -> None:
        if self._stopped.is_set() or self._known.is_set():
            return
        self.cause = cause
        self._known.set()
        if not self._stopped.wait(GRACE_S):
            self._end(cause)

    def _look(self) -> str | None:
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats))
        if self._store.check([_FAILED]):
            return self._store.get(_FAILED).decode(errors="replace")
        others = [r for r in range(self._size) if r != self._rank] if self._rank == 0 else [0]
        values = self._store.multi_get([self._key(rank) for rank in others])
        now = time.monotonic()
        asleep = now - self._looked > DEAD_S / 2  # this process itself was stopped: the others may have waited for it
        self._looked = now
        silent = [rank for rank, value in zip(others, values, strict=True) if self._silent(rank, value, now, asleep)]
        if not silent:
            return None
        named = ", ".join(map(str, silent))
        cause = f"rank {named} did not answer for {DEAD_S:.0f} s: killed, stopped, or its machine is gone"
        self._store.set(_FAILED, cause)
        return cause

    def _silent(self, rank: int, value: bytes, now: float, asleep: bool) -> bool:
        before = self._seen.get(rank)
        if before is None or before[0] != value or asleep:
            self._seen[rank] = (value, now)
            return False
        return now - before[1] > DEAD_S

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0][:200]


def _exit(cause: str) -> None:
    sys.stderr.write(f"headrace: TrainError: {cause}; the same command goes on from the last checkpoint\n")
    sys.stderr.flush()
    os._exit(TrainError.exit_code)
