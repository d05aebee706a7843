"""Many producers, one writer, and a bound on the bytes between them.

In: records from any number of threads. Out: the same records in the store, written by one thread in the order they
came. A producer waits while the queue holds `queue_bytes`: a slow disk slows capture down, it does not fill the memory.
"""

import threading
import time
from collections import deque
from types import TracebackType

from headrace.errors import StoreError
from headrace.record import Record
from headrace.store.budget import record_bytes
from headrace.store.writer import StoreWriter

_IDLE_SECONDS = 1.0


class RecordQueue:
    """Feeds a StoreWriter until `close`. `waited_s` sums the seconds that producers spent waiting for the disk."""

    def __init__(self, writer: StoreWriter, queue_bytes: int) -> None:
        """Args: queue_bytes: most bytes held; a record that is larger is taken when the queue is empty."""
        self.waited_s = 0.0
        self._writer, self._queue_bytes = writer, queue_bytes
        self._records: deque[Record] = deque()
        self._held = 0
        self._error: StoreError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="headrace-write", daemon=True)
        self._thread.start()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait, the record that is being written included."""
        return self._held

    def add(self, record: Record) -> None:
        """Hand over a record; wait while the queue is full.

        Raises: StoreError, the writer's own, when this or an earlier record could not be written.
        """
        size = record_bytes(record)
        with self._changed:
            began = time.monotonic()
            self._changed.wait_for(lambda: self._stopped or not self._held or self._held + size <= self._queue_bytes)
            self.waited_s += time.monotonic() - began
            self._raise()
            self._records.append(record)
            self._held += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything handed over is written (not yet sealed). Raises: as `add`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._held)
            self._raise()

    def close(self) -> None:
        """Write what is left and end the thread; the writer stays open. Raises: as `add`. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "RecordQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreError:
            if error is None:  # otherwise the first error is the one to tell
                raise

    @property
    def _stopped(self) -> bool:
        return self._error is not None or self._closing or not self._thread.is_alive()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise StoreError("an open queue", "it is closed, or this process was forked", "open the store again")

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._closing, _IDLE_SECONDS)
                if not self._records and self._closing:
                    return
                record = self._records.popleft() if self._records else None
            try:
                if record is None:
                    self._writer.seal_if_old()
                    continue
                self._writer.add(record)
            except StoreError as exc:
                self._stop(exc)
                return
            with self._changed:
                self._held -= record_bytes(record)
                self._changed.notify_all()

    def _stop(self, error: StoreError) -> None:
        with self._changed:
            self._error = error
            self._records.clear()
            self._held = 0
            self._changed.notify_all()
