"""A `vllm serve` that runs as a child: started, watched, stopped with all of its own processes.

In: a command and a log file. Out: a server that is healthy, or at once the exit code and last lines of one that died.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headrace.errors import TargetError

START_S = 1800.0  # large weights take minutes to load
LAST_LINES = 12
STOP_S = 20.0  # what a server may take to end by itself
_POLL_S = 0.25
_ASK_S = 2.0
# Becomes the server, after it has asked Linux for a SIGTERM when the watcher is killed (1 is PR_SET_PDEATHSIG), and
# left a process behind, a child of nobody, that kills what is left of the server's group a while after the watcher
# has gone: workers outlive a server that was killed, or was still starting.
_WITH_REAPER = """
import ctypes, os, select, signal, sys, time
watcher, server, grace = int(sys.argv[1]), os.getpid(), float(sys.argv[2])
watched = os.pidfd_open(watcher)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != watcher:
    sys.exit("whoever watches this server has ended")
if os.fork():
    os.wait()
    os.execvp(sys.argv[3], sys.argv[3:])
os.setsid()
if os.fork():
    os._exit(0)

def lives():
    try:
        os.killpg(server, 0)
    except ProcessLookupError:
        return False
    return True

poll = select.poll()
poll.register(watched, select.POLLIN)
while not poll.poll(1000):
    if not lives():
        os._exit(0)
until = time.monotonic() + grace
while lives() and time.monotonic() < until:
    time.sleep(0.2)
if lives():
    os.killpg(server, signal.SIGKILL)
"""


class EngineProcess:
    """One server; a context manager that stops it."""

    def __init__(self, command: Sequence[str], added: Mapping[str, str], log: Path, url: str) -> None:
        """Start the command in a process group of its own, output to `log`.

        Raises: TargetError for a port that is taken, and for a command that cannot be started.
        """
        _check_port(url)
        if shutil.which(command[0]) is None:
            raise TargetError(f"to start {command[0]}", "no such program", "check engine.python")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.url, self.log = url, log
        reaped = [sys.executable, "-c", _WITH_REAPER, str(os.getpid()), str(STOP_S)]
        before = reaped if sys.platform == "linux" else []
        with open(log, "wb") as out:
            self._child = subprocess.Popen(
                [*before, *command],
                env={**os.environ, **added},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the child, which leads the group."""
        return self._child.pid

    def wait_healthy(self, timeout_s: float, told: Callable[[float], None] = lambda _: None) -> float:
        """Wait until `/health` answers. Returns: seconds it took.

        Args: told: called now and then with the seconds so far.
        Raises: TargetError at once when the child has ended, or after `timeout_s`.
        """
        started = time.monotonic()
        while (passed := time.monotonic() - started) < timeout_s:
            self.check()
            if is_healthy(self.url):
                return passed
            told(passed)
            time.sleep(_POLL_S)
        hint = f"see {self.log}; a large model needs longer"
        raise TargetError(f"a healthy server at {self.url} within {timeout_s:.0f} s", self._last_lines(), hint)

    def check(self) -> None:
        """Raise TargetError with exit code and last lines when the child has ended."""
        code = self._child.poll()
        if code is not None:
            self._end_group(signal.SIGKILL)
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise TargetError("a vLLM server that runs", f"{what}; {self._last_lines()}", f"see {self.log}")

    def watch(self) -> None:
        """Return never: raise as `check` does when the child ends."""
        while True:
            self.check()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the server and what it started: asked first, killed after STOP_S."""
        if self._child.poll() is None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_S)
        self._end_group(signal.SIGKILL)
        self._child.wait()

    def _end_group(self, how: signal.Signals) -> None:
        """Workers may outlive a server that was killed."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, how)

    def _last_lines(self) -> str:
        lines = self.log.read_bytes()[-64 * 1024 :].decode("utf-8", "replace").splitlines()
        kept = [line for line in lines if line.strip()][-LAST_LINES:]
        return "the last lines of its log:\n" + "\n".join(kept) if kept else "its log is empty"


def is_healthy(url: str) -> bool:
    """Whether `/health` of a server answers with success."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ASK_S) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _check_port(url: str) -> None:
    """A server would say so only after it has loaded its weights."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, int(port)))
        except OSError as exc:
            raise TargetError(f"a free port {port} on {host}", str(exc), "choose another port") from exc
