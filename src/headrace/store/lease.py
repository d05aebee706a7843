"""Whose turn it is to write a store of objects.

In: the objects and a token of this writer. Out: a generation that no other writer has, claimed by creating
`leases/GENERATION` once, and renewed while the writer lives. A lease that nobody renews any more is passed over. It
keeps writers from each other's way; that one which slept through its lease commits nothing is the log's doing.
"""

import logging
import os
import socket
import threading
import time

from headrace.errors import StoreError
from headrace.store.digested import dump_digested, load_digested
from headrace.store.objects import Objects

FOLDER = "leases"
LEASE_SECONDS = 60.0  # unchanged for so long, by the watch of who waits: no two clocks are compared
_BEATS = 4  # renewals in that time
log = logging.getLogger(__name__)


class Lease:
    """Held from `claim` until `release`, as far as the log agrees."""

    def __init__(self, objects: Objects, owner: str, seconds: float = LEASE_SECONDS) -> None:
        """Args: owner: whose earlier leases have ended for sure when this one is claimed, because a lock says so."""
        self._objects, self._owner, self._seconds = objects, owner, seconds
        self._key, self._beat, self._pid = "", 0, os.getpid()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, at_least: int) -> int:
        """Wait until the last lease has ended, then take the next. Returns: its generation, `at_least` or more.

        Raises: StoreError, naming the holder, when another writer is alive or was faster.
        """
        held = sorted(self._objects.sizes(FOLDER))
        if held:
            self._wait(held[-1])
        last = int(held[-1].rpartition("/")[2]) if held else 0
        generation = max(last + 1, at_least)
        self._key = f"{FOLDER}/{generation:06d}"
        if not self._objects.create(self._key, self._content("held")):
            raise self._taken("another writer that began just now")
        self._thread = threading.Thread(target=self._renew, name="headrace-lease", daemon=True)
        self._thread.start()
        return generation

    def release(self) -> None:
        """Let the next writer begin at once; safe to call twice, and in a forked child, where it does nothing."""
        if self._over.is_set() or os.getpid() != self._pid or self._thread is None:
            return
        self._over.set()
        self._thread.join()
        try:
            self._objects.replace(self._key, self._content("released"))
        except StoreError as exc:
            log.warning("the lease was not released, the next writer has to wait for it: %s", exc.args[1])

    def _wait(self, key: str) -> None:
        seen, since = self._objects.get(key), time.monotonic()
        lease = load_digested(seen, f"{self._objects.address}/{key}")
        if lease["state"] == "held" and lease["owner"] != self._owner:
            who, most = f"process {lease['pid']} on {lease['host']}", f"at most {self._seconds:g} s"
            log.warning("%s was writing at %s; waiting %s for a sign of life", who, self._objects.address, most)
        while lease["state"] == "held" and lease["owner"] != self._owner:
            if time.monotonic() - since >= self._seconds:
                return
            time.sleep(min(self._seconds / _BEATS / 4, 1.0))
            now = self._objects.get(key)
            lease = load_digested(now, f"{self._objects.address}/{key}")
            if now != seen and lease["state"] == "held":
                raise self._taken(f"process {lease['pid']} on {lease['host']}, which is alive")

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / _BEATS):
            self._beat += 1
            try:
                self._objects.replace(self._key, self._content("held"))
            except StoreError as exc:
                log.warning("the lease could not be renewed: %s", exc.args[1])

    def _content(self, state: str) -> bytes:
        told = {
            "state": state,
            "owner": self._owner,
            "beat": self._beat,
            "pid": self._pid,
            "host": socket.gethostname(),
        }
        return dump_digested(told).encode()

    def _taken(self, holder: str) -> StoreError:
        hint = "wait for that writer or stop it; its lease ends when nobody renews it"
        return StoreError(f"to be the only writer of {self._objects.address}", f"it is held by {holder}", hint)
