"""The target in a process of its own, which captures whole groups as it is told.

In: a run file and its folder; then capture groups, with the rows that are needed of each. Out: their records, by the
code of an offline capture, as the segments' own messages with digests over a local pipe; nothing is pickled. A worker
that dies is started again, later each time, and its group asked for again; one that keeps dying stops the run with the
last lines it wrote. Started as `python -m headrace.stream.worker FD`; only that process imports torch.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from headrace import errors
from headrace.config import RunFile, RunFolder
from headrace.errors import HeadraceError, StoreError, StreamError
from headrace.order import CaptureGroup
from headrace.progress import Silent
from headrace.record import SEGMENT_BYTES, Record, sealed_message, segment_from_message
from headrace.store.manifest import Manifest

MOST_DEATHS = 8  # in a row without a group between; or of one group
MOST_FIRST_DEATHS = 2  # before it has ever been ready: such causes seldom go away
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
MESSAGE_BYTES = 8 * SEGMENT_BYTES  # most that a message may have: a payload, and ids and mask of its tokens
_LAST_BYTES = 4096
_POLL_S = 0.5


class WorkerDied(StreamError):
    """A worker ended in the middle of its work; the same work may be asked of it again."""


@dataclass(frozen=True)
class Failed:
    """A sample whose states failed their check twice, and why."""

    row: int
    reason: str


class GroupWorker(Protocol):
    """Whoever captures groups for a server."""

    def open(self) -> Manifest:
        """Be ready. Returns: of what its states are. Raises: HeadraceError when it never will be."""
        ...

    def keep_basis(self) -> None:
        """Put the codec's basis beside the states."""
        ...

    def capture(self, group: CaptureGroup, wanted: Collection[int], generation: int) -> Iterator[Record | Failed]:
        """Yield one item for each wanted row. Raises: WorkerDied, to be asked again; HeadraceError, to give up."""
        ...

    def last_lines(self) -> str:
        """What it last wrote, for errors."""
        ...

    def close(self) -> None:
        """End; from any thread; a capture that runs raises WorkerDied."""
        ...


class WorkerProcess:
    """A `GroupWorker` of one transformers target, in a child process; used by one thread, closed by any."""

    def __init__(self, cfg: RunFile, folder: RunFolder, log: Path, timeout_s: float) -> None:
        """Args: log: what the child writes. timeout_s: a group that takes longer counts as a death."""
        self._run = {"run": cfg.model_dump(mode="json"), "root": str(folder.root)}
        self._log, self._timeout_s = log, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._deaths, self._deaths_of = 0, dict[tuple[int, int], int]()
        self._closing = threading.Event()
        self._manifest: Manifest | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def open(self) -> Manifest:
        """Start the child and wait until its target is loaded; tried again when it dies.

        Raises: the child's own HeadraceError; StreamError, with its last lines, when it keeps dying.
        """
        while True:
            try:
                return self._start()
            except WorkerDied:
                self._count_death(None)

    def keep_basis(self) -> None:
        """Put the codec's basis beside the states. Raises: as `capture`."""
        self._send({"keep_basis": True})
        self._answer()

    def capture(self, group: CaptureGroup, wanted: Collection[int], generation: int) -> Iterator[Record | Failed]:
        """Yield records of the wanted rows, in the group's order, and what failed.

        Raises: WorkerDied when the child died or did not answer in time; the child's own HeadraceError, and
        StreamError when it keeps dying.
        """
        name = (group.window, group.index)
        try:
            if self._process is None:
                self._start()
            rows = sorted(wanted)
            self._send(
                {"rows": group.rows, "padded_tokens": group.padded_tokens, "wanted": rows, "generation": generation}
            )
            while "done" not in (answer := self._answer()):
                yield self._item(answer)
        except WorkerDied:
            self._count_death(name)
            raise
        self._deaths = 0
        self._deaths_of.pop(name, None)

    def last_lines(self) -> str:
        """The end of the child's log."""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_BYTES))
                return log.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Kill the child; safe to call twice."""
        self._closing.set()
        process = self._process
        if process is not None:
            _kill(process)

    def _start(self) -> Manifest:
        self._pipe, child = Pipe()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab" if self.num_starts else "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.stream.worker", str(child.fileno())],
                stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                stdout=log,
                stderr=log,
                pass_fds=[child.fileno()],
            )
        child.close()
        self.num_starts += 1
        if self._closing.is_set():  # closed meanwhile
            self._process.kill()
        self._send(self._run)
        manifest = Manifest.parse(self._answer()["manifest"].encode(), "a capture worker's manifest")
        if self._manifest is not None:
            self._manifest.compare(manifest, "the worker that was started first")
        self._manifest = manifest
        return manifest

    def _send(self, message: dict[str, Any]) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError as exc:
            raise self._died(str(exc)) from exc

    def _receive(self) -> bytes:
        assert self._pipe is not None
        waited = 0.0
        try:
            while not self._pipe.poll(_POLL_S):
                waited += _POLL_S
                if waited > self._timeout_s:
                    raise self._died(f"no answer in {self._timeout_s:g} s")
            return self._pipe.recv_bytes(MESSAGE_BYTES)
        except (EOFError, OSError) as exc:
            raise self._died(str(exc) or "its end of the pipe closed") from exc

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._receive())
        if "error" in answer:
            self._end()
            kind = getattr(errors, answer["kind"], StreamError)
            raise kind(*answer["error"])
        return answer

    def _item(self, answer: dict[str, Any]) -> Record | Failed:
        if "failed" in answer:
            return Failed(answer["row"], answer["failed"])
        try:
            segments = [segment_from_message(self._receive(), bytes.fromhex(own)) for own in answer["segments"]]
        except StoreError as exc:
            raise self._died(f"damaged bytes in the pipe: {exc.args[1]}") from exc
        return Record(tuple(segments))

    def _died(self, cause: str) -> WorkerDied:
        code = self._end()
        found = f"exit code {code} ({cause}); its last lines:\n{self.last_lines()}"
        return WorkerDied("a capture worker that answers", found, f"see {self._log}")

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        return None if process is None else _kill(process)

    def _count_death(self, group: tuple[int, int] | None) -> None:
        """Wait before the next start. Raises: StreamError when there were too many."""
        self._deaths += 1
        of_group = 0
        if group is not None:
            of_group = self._deaths_of[group] = self._deaths_of.get(group, 0) + 1
        if self._closing.is_set():
            raise WorkerDied("an open worker", "it is closed", "open the server again")
        most = MOST_FIRST_DEATHS if self._manifest is None else MOST_DEATHS
        if self._deaths > most or of_group > MOST_DEATHS:
            where = "" if group is None else f", {of_group} of them in group {group[1]} of window {group[0]}"
            found = f"{self._deaths} deaths in a row{where}; its last lines:\n{self.last_lines()}"
            raise StreamError("a capture worker that stays alive", found, f"see {self._log}")
        self._closing.wait(min(FIRST_WAIT_S * 2 ** (self._deaths - 1), LONGEST_WAIT_S))


def _kill(process: "subprocess.Popen[bytes]") -> int:
    """Returns: its exit code, if it had ended by itself."""
    process.kill()
    assert process.stdin is not None
    process.stdin.close()
    return process.wait()


def main(descriptor: int) -> int:
    """The child: open the run's target, then answer until the pipe ends. Returns: the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe = Connection(descriptor)
    try:
        _serve(pipe, json.loads(pipe.recv_bytes()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except HeadraceError as exc:
        kind = next(base.__name__ for base in type(exc).__mro__ if base.__module__ == errors.__name__)
        pipe.send_bytes(json.dumps({"error": exc.args, "kind": kind}).encode())
        return exc.exit_code
    return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _serve(pipe: Connection, run: dict[str, Any]) -> None:
    from headrace.capture.capture import open_capture
    from headrace.target.transformers_target import load_target

    cfg, folder = RunFile.model_validate(run["run"]), RunFolder(Path(run["root"]))
    opened = open_capture(cfg, folder, load_target(cfg.target), Silent())
    pipe.send_bytes(json.dumps({"manifest": opened.manifest.to_text()}).encode())
    while True:
        request = json.loads(pipe.recv_bytes())
        if "rows" not in request:
            opened.keep_basis(folder)
        else:
            samples = [opened.prepared.sample(row) for row in request["rows"]]
            wanted = frozenset(request["wanted"])
            records, wrong = opened.encoder.records(samples, request["padded_tokens"], wanted, request["generation"])
            for record in records:
                _send_record(pipe, record)
            for row, reason in wrong.items():
                pipe.send_bytes(json.dumps({"row": row, "failed": reason}).encode())
        pipe.send_bytes(json.dumps({"done": True}).encode())


def _send_record(pipe: Connection, record: Record) -> None:
    sealed = [sealed_message(segment) for segment in record.segments]
    pipe.send_bytes(json.dumps({"row": record.row, "segments": [seal.hex() for _, seal in sealed]}).encode())
    for message, _ in sealed:
        pipe.send_bytes(message)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
