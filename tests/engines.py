"""Fake engines for tests: in this process, or as children that can be killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from headrace.codec.spec import CodecSpec
from headrace.target.endpoints import Endpoint
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.tiny_target import HIDDEN_SIZE

TAPS = ("after_block:0", "after_block:2")
RAW = CodecSpec("raw", 0, len(TAPS), HIDDEN_SIZE, "float32")


def ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, num_tokens]).integers(3, 64, num_tokens).tolist())


@contextlib.contextmanager
def fake_endpoint(folder: Path, model: Path, fault: str = "", **options: Any) -> Iterator[tuple[FakeEngine, Endpoint]]:
    """An engine in this process and an endpoint that has seen that it is healthy."""
    options = {"taps": TAPS, "codec": RAW, "timeout_s": 10.0, **options}
    timeout_s = options.pop("timeout_s")
    with FakeEngine(folder, str(model), fault=fault, **options) as engine:
        endpoint = Endpoint(folder, timeout_s)
        endpoint.reopen()
        yield engine, endpoint


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def stand_in(folder: Path, code: str) -> Path:
    """A program that stands for the python of vLLM's environment; `{python}` in its code is the one that runs it."""
    path = folder / "python"
    path.write_text(code.format(python=sys.executable))
    path.chmod(0o755)
    return path


class EngineProcess:
    """A fake engine as a child; killed and started again on the same port."""

    def __init__(
        self, folder: Path, model: Path, codec: CodecSpec = RAW, taps: Sequence[str] = TAPS, dtype: str = "float32"
    ) -> None:
        self.folder, self.port = folder, free_port()
        self._command = [
            sys.executable, "-m", "headrace.testing.fake_engine", "--folder", str(folder), "--model", str(model),
            "--taps", ",".join(taps), "--codec", json.dumps(codec.to_json()), "--port", str(self.port),
            "--dtype", dtype,
        ]  # fmt: skip
        self.start()

    def start(self, fault: str = "") -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.folder / "log", "ab") as log:
            command = [*self._command, "--fault", fault]
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def wait_until_healthy(self) -> None:
        for _ in range(600):
            assert self._child.poll() is None, (self.folder / "log").read_text()
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                urllib3.request("GET", f"http://127.0.0.1:{self.port}/health", retries=False, timeout=2)
                if (self.folder / "engine.json").exists():
                    return
            time.sleep(0.1)
        raise AssertionError("the fake engine does not come up")

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()
