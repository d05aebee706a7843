"""A supply that holds a part, and captures the rest when it is needed.

In: positions that readers ask for. Out: their records: the kept ones from the states folder, all others captured ahead
of the readers by whole groups, and passed through a ring that is bounded in bytes. Captures follow the order of
positions; what a reader waits for always comes first. A record that was released, made room or was damaged is captured
again, with its group, so its bits are the same. Holes are declared here, only for samples that fail their check twice.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, ConfigError, HeadraceError, StreamError
from headrace.order import server_of, share_within
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.store.budget import SEGMENT_OVERHEAD, SHARD_OVERHEAD, TOKEN_OVERHEAD, record_bytes
from headrace.store.manifest import Manifest
from headrace.store.reader import DamagedRecord
from headrace.stream.demand import Demand
from headrace.stream.kept import KeptRecords
from headrace.stream.ring import Key, RecordRing
from headrace.stream.supply import Item
from headrace.stream.worker import Failed, GroupWorker, WorkerDied, WorkerProcess

_LOOK_S = 1.0  # how often a waiting thread looks up
_RATE_S = 10.0  # over which produced_s is taken
SPARE = 0.98  # of store.max_bytes: sizes of samples are what is expected


@dataclass(frozen=True)
class _Task:
    """One group to capture: which rows, and under which keys their records are needed."""

    number: int
    keys: Mapping[int, Sequence[Key]]
    wanted: frozenset[int]
    num_bytes: int


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    produced_records: int = 0
    produced_bytes: int = 0
    groups: int = 0
    worker_deaths: int = 0
    capture_waited_s: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=deque)


class FillSupply:
    """Implements `headrace.stream.supply.Supply` over a run's folder and its target; `failed` is what stopped it."""

    def __init__(
        self,
        cfg: RunFile,
        folder: RunFolder,
        progress: Progress,
        open_worker: Callable[[int], GroupWorker] | None = None,
    ) -> None:
        """Start the workers and open the folder; returns when the first target is loaded.

        Args:
            cfg: with a `capture.codec` that can encode, as raw_slice.with_codec gives it.
            open_worker: makes worker k; none means a process with the run's target.
        Raises: ConfigError for a run that is not captured here; what a worker raises; StoreError for a folder of
        another identity, or that another process writes.
        """
        _check_served(cfg)
        self.failed: HeadraceError | None = None
        self._cfg, self._progress = cfg, progress
        self._prepared = PreparedSet.open(folder.prepared)
        self._ids = self._prepared.ids()
        self._part, self._parts = map(int, cfg.serve.part.split("/"))
        self._own_N = np.array([server_of(id, self._parts) == self._part - 1 for id in self._ids], dtype=np.bool_)
        made = open_worker or _processes(cfg, folder)
        self._workers = [made(k) for k in range(cfg.serve.workers)]
        try:
            manifest = self._workers[0].open()
            self._bytes_N = _sizes(self._prepared, manifest)
            own = np.flatnonzero(self._own_N)
            share = _share(cfg, [self._ids[row] for row in own], self._bytes_N[own])
            self._kept = KeptRecords(folder.states, manifest, cfg.store, share, self._prepared, progress)
        except HeadraceError:
            self._close_workers()
            raise
        self._manifest = manifest
        lengths, eligible = np.asarray(self._prepared.lengths, dtype=np.int64), ~np.asarray(self._prepared.heldout)
        sizes = cfg.capture.group_tokens, cfg.train.epochs, cfg.serve.ahead
        self._demand = Demand(lengths, eligible, cfg.order, *sizes, self._own_N)
        self._ring = RecordRing(cfg.serve.ring_bytes)
        self._holes = self._kept.holes()
        self._inflight: dict[int, _Task] = {}
        self._floors: dict[str, tuple[int, int]] = {}
        self._counts, self._closing = _Counts(), False
        self._changed = threading.Condition()
        self._note_small_ring()
        self._threads = [
            threading.Thread(target=self._fill, args=(worker, k == 0), name=f"headrace-fill-{k}", daemon=True)
            for k, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def manifest(self) -> Mapping[str, Any]:
        """The content of manifest.json."""
        return self._manifest.to_json()

    def take(self, positions: Sequence[Position], max_bytes: int, wait_s: float) -> list[Item]:
        """The items of a prefix of `positions`, in order; from the first that is not there, all are asked for.

        Returns: at least one item, of at most `max_bytes` together unless the first alone is larger;
        nothing after `wait_s` seconds without the first one.
        Raises: StreamError for a position that is not of the prepared set, and what stopped the supply.
        """
        self._check(positions[:1])
        found: list[Item] = []
        filled = 0
        for k, position in enumerate(positions):
            key = self._key(position)
            item = self._find(position, key)
            if item is None and not found:
                item = self._await(positions[k:], key, wait_s)
            filled += 0 if item is None or isinstance(item, Hole) else item.num_bytes
            if item is None:
                if found:
                    self._hint(positions[k:], key)
                break
            if found and filled > max_bytes:
                break
            found.append(item)
            with self._changed:
                waited = self._ring.take(key)
                self._demand.taken(key)
                self._counts.misses += waited
                self._counts.hits += not waited
        return found

    def damaged(self, position: Position, error: DamagedRecord) -> None:
        """Capture a kept record again: it cannot be read."""
        self._kept.damaged(position.row, error)

    def holes(self) -> Mapping[int, Hole]:
        """Holes declared so far, by row."""
        with self._changed:
            return dict(self._holes)

    def commit(self, reader: str, position: Position) -> None:
        """Release what lies before the smallest position over all readers. Raises: as `take`."""
        self._check([position])
        with self._changed:
            self._floors[reader] = (position.epoch, max(position.place, 0))
            self._ring.release(self._floor())
            self._demand.release(self._floor())
            self._changed.notify_all()

    def want(self, positions: Sequence[Position]) -> None:
        """Say what will be asked for next. Raises: as `take`."""
        self._check(positions)
        with self._changed:
            self._ask([self._demand.key(position) for position in positions])

    def figures(self) -> dict[str, float]:
        """Counters since the start: hits (there when asked for), misses, produced_records, produced_bytes, groups,
        worker_deaths, holes, damaged, dropped (made room), capture_waited_s (for room in the ring). Gauges: produced_s
        (records a second, lately), ring_bytes, ring_bound, ring_records, kept_records.
        """
        with self._changed:
            own = self._counts
            self._trim()
            counted = {name: float(getattr(own, name)) for name in _Counts.__dataclass_fields__ if name != "recent"}
            return {
                **counted,
                "holes": len(self._holes),
                "damaged": self._kept.num_damaged,
                "dropped": self._ring.num_dropped,
                "produced_s": sum(n for _, n in own.recent) / _RATE_S,
                "ring_bytes": self._ring.num_bytes,
                "ring_bound": self._ring.bound_bytes,
                "ring_records": len(self._ring),
                "kept_records": self._kept.num_records,
            }

    def close(self) -> None:
        """End the workers and seal the folder; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._close_workers()
        for thread in self._threads:
            thread.join()
        self._kept.close()

    def _close_workers(self) -> None:
        for worker in self._workers:
            worker.close()

    def _check(self, positions: Sequence[Position]) -> None:
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)
        if self._closing:
            raise StreamError("an open supply", "it is closed", "start the server again")
        for own in positions:
            if own.epoch < 0 or not 0 <= own.row < len(self._ids) or self._ids[own.row] != own.id:
                found = f"epoch {own.epoch}, row {own.row} with id {own.id.hex()}"
                raise StreamError("positions of the prepared set", found, "read with the set that is served")
            if not self._own_N[own.row]:
                found = f"row {own.row}, of part {server_of(own.id, self._parts) + 1}"
                expected = f"samples of part {self._part}/{self._parts}, servers in the order of their serve.part"
                raise StreamError(expected, found, "name all servers in source, in that order")

    def _key(self, position: Position) -> Key:
        self._check([position])
        with self._changed:
            return self._demand.key(position)

    def _hint(self, positions: Sequence[Position], first: Key) -> None:
        """Ask for positions, once: whoever polls need not say it each time. Args: first: the key of the first one."""
        with self._changed:
            if not self._demand.asked(first):
                self._ask([self._demand.key(position) for position in positions])

    def _ask(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        self._demand.ask(keys)
        self._ring.want(keys)
        if min(keys)[:2] < self._floor() and any(key[1] >= 0 for key in keys):
            self._floors.clear()  # a reader went back; what it will not ask for again it says anew
        self._changed.notify_all()

    def _floor(self) -> tuple[int, int]:
        return min(self._floors.values(), default=(0, 0))

    def _find(self, position: Position, key: Key) -> Item | None:
        """The item, if it is there now."""
        item = self._ring.peek(key) or self._holes.get(position.row)
        return item or self._kept.find(position.row, position.id)

    def _await(self, positions: Sequence[Position], key: Key, wait_s: float) -> Item | None:
        """Wait until the first item is there, as the one that a reader needs first; it stays owed for a while."""
        end = time.monotonic() + wait_s
        row = positions[0].row
        while True:
            with self._changed:
                if self._ring.owe(key):
                    self._changed.notify_all()
                self._hint(positions, key)
                left = end - time.monotonic()
                if left > 0 and not (key in self._ring or row in self._holes or row in self._kept):
                    self._changed.wait(min(left, _LOOK_S))
            item = self._find(positions[0], key)
            if item is not None or left <= 0:
                return item
            self._check([])

    def _fill(self, worker: GroupWorker, first: bool) -> None:
        """One worker's thread: capture what is needed next, until it is closed."""
        try:
            if first:
                self._stop_if_too_many(worker)  # a store may hold too many already
                worker.keep_basis()
            while (task := self._next()) is not None:
                try:
                    group = self._demand.groups[task.number]
                    for item in worker.capture(group, task.wanted, self._kept.generation):
                        self._accept(task, item, worker)
                    self._counts.groups += 1
                except WorkerDied as exc:
                    self._counts.worker_deaths += 1
                    if not self._closing:
                        self._progress.note(f"capture: started again after {exc.args[1]}")
                finally:
                    with self._changed:
                        del self._inflight[task.number]
                        self._changed.notify_all()
        except WorkerDied:
            pass  # closed before it began
        except HeadraceError as exc:
            with self._changed:
                self.failed = self.failed or exc
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        """The group that is needed first; waits for one. None when there is nothing more to do."""
        while True:
            with self._changed:
                if self._closing or self.failed is not None:
                    return None
                task, full = self._choose()
                if task is not None:
                    self._inflight[task.number] = task
                    return task
                began = time.monotonic()
                self._changed.wait(_LOOK_S)
                self._counts.capture_waited_s += (time.monotonic() - began) if full else 0.0
            self._kept.seal_if_old()  # a slow disk holds up no reader

    def _choose(self) -> tuple[_Task | None, bool]:
        """A group that a reader waits for, whatever the room; else the next one that finds room.

        Returns: the task, if any, and whether one is needed that finds no room.
        """
        for key in self._ring.owed():
            task = self._task(key)
            if task is not None:
                return task, False
        reserved = sum(task.num_bytes for task in self._inflight.values())
        for key in self._demand.pending():
            if key in self._ring or self._demand.passed(key):
                continue
            task = self._task(key)
            if task is not None:
                full = task.num_bytes > self._ring.room(key) - reserved
                return (None, True) if full else (task, False)
        return None, False

    def _task(self, key: Key) -> _Task | None:
        """The capture of a key's group; None where that is on its way, or the key needs none."""
        epoch, _, row = key
        number = self._demand.group(row)
        if number in self._inflight or row in self._holes or row in self._kept:
            return None
        floor = self._floor()
        keys: dict[int, list[Key]] = {}
        wanted: set[int] = set()
        for member in self._demand.groups[number].rows:
            if member in self._holes or member in self._kept:
                continue
            needed = [k for k in self._demand.keys_of(member, epoch, floor) if k not in self._ring]
            if member == row:
                needed = [key, *(k for k in needed if k != key)]
            if needed:
                keys[member] = needed
            if needed or self._kept.wants(member):
                wanted.add(member)
        num_bytes = sum(int(self._bytes_N[member]) * len(own) for member, own in keys.items())
        return _Task(number, keys, frozenset(wanted), num_bytes)

    def _accept(self, task: _Task, item: Record | Failed, worker: GroupWorker) -> None:
        if isinstance(item, Failed):
            self._declare(item, worker)
            return
        self._kept.add(item)
        size = record_bytes(item)
        with self._changed:
            own = self._counts
            own.produced_records += 1
            own.produced_bytes += item.num_bytes
            own.recent.append((time.monotonic(), 1))
            self._trim()
            for key in task.keys.get(item.row, ()):
                self._ring.put(key, item, size, taken=self._demand.passed(key))
            self._changed.notify_all()

    def _declare(self, item: Failed, worker: GroupWorker) -> None:
        """Make a sample a hole. Raises: CaptureError when there are too many."""
        hole = self._kept.fail(item.row, item.reason)
        self._progress.note(f"row {item.row} failed: {item.reason}")
        with self._changed:
            self._holes[item.row] = hole
            self._changed.notify_all()
        self._stop_if_too_many(worker)

    def _stop_if_too_many(self, worker: GroupWorker) -> None:
        share, num_samples = self._cfg.capture.tolerate_failures, self._prepared.num_samples
        if len(self._holes) > share * num_samples:
            last = next(reversed(self._holes.values()))
            found = f"{len(self._holes)}, the last one row {last.row}: {last.reason}"
            if lines := worker.last_lines():
                found += f"; the target's last lines:\n{lines}"
            hint = "mend the target; or raise capture.tolerate_failures and go on"
            raise CaptureError(f"at most {share:.1%} of {num_samples} samples to fail", found, hint)

    def _trim(self) -> None:
        end = time.monotonic() - _RATE_S
        while self._counts.recent and self._counts.recent[0][0] < end:
            self._counts.recent.popleft()

    def _note_small_ring(self) -> None:
        """A group's members are needed all over their window: a ring that holds less has them captured again."""
        window = self._cfg.order.window_samples
        sums = np.add.reduceat(self._bytes_N * self._own_N, np.arange(0, len(self._bytes_N), window))
        if self._ring.bound_bytes < sums.max():
            held = f"serve.ring_bytes {self._ring.bound_bytes:,}"
            self._progress.note(f"{held} is less than a window's {int(sums.max()):,}: some samples are captured twice")


def _check_served(cfg: RunFile) -> None:
    """Refuse what capture on demand does not know yet."""
    hint = "capture first, then run `headrace serve --stored`"
    if cfg.target.engine != "transformers":
        raise ConfigError("target.engine transformers, to capture on demand", cfg.target.engine, hint)
    if cfg.store.at is not None:
        raise ConfigError("states in the run's folder, to capture on demand", f"store.at {cfg.store.at}", hint)


def _processes(cfg: RunFile, folder: RunFolder) -> Callable[[int], GroupWorker]:
    logs = folder.root / "serve"
    return lambda k: WorkerProcess(cfg, folder, logs / f"worker-{k}.log", cfg.serve.capture_timeout_s)


def _sizes(prepared: PreparedSet, manifest: Manifest) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """float64 [N]: bytes that a record of each row is expected to take."""
    lengths = np.asarray(prepared.lengths, dtype=np.float64)
    return lengths * (manifest.codec.bytes_per_token() + TOKEN_OVERHEAD) + SEGMENT_OVERHEAD


def _share(cfg: RunFile, ids: Sequence[bytes], bytes_N: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    """The share of samples that is kept: as it is set, else what store.max_bytes holds, else all."""
    if cfg.serve.keep_share is not None:
        return cfg.serve.keep_share
    if cfg.store.max_bytes is None:
        return 1.0
    return share_within(ids, bytes_N.tolist(), SPARE * (cfg.store.max_bytes - SHARD_OVERHEAD))
