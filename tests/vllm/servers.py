"""Real vLLM servers for tests: one run on the demo target, its engine launched by `headrace engine`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from headrace.target.endpoints import Endpoint
from headrace.target.engine_file import EngineFile
from headrace.target.vllm_process import is_healthy

PORT = 8391
TAPS = ("after_block:20", "after_block:1", "after_block:27")  # not in the engine's order
FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "512", "--max-num-seqs", "16")
START_S = 400


def vllm_python() -> str:
    """The Python of an environment with vLLM and headrace; the test is skipped where none is named."""
    found = os.environ.get("HEADRACE_VLLM_PYTHON")
    if not found:
        pytest.skip("HEADRACE_VLLM_PYTHON names no python with vLLM and headrace")
    return found


def run_file(folder: Path, **engine: object) -> Path:
    """A run of the demo target in float32, raw states of three taps out of order."""
    run = {
        "run": str(folder / "run"),
        "target": {"dtype": "float32", "taps": list(TAPS), "engine": "vllm"},
        "capture": {"codec": "rotated:8", "dtype": "float32"},
        "engine": {"python": vllm_python(), "port": PORT, "flags": list(FLAGS), **engine},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def launched(path: Path, *words: str) -> "subprocess.Popen[bytes]":
    """`headrace engine RUN --launch`, what it says in launch.log beside the run file."""
    command = [str(Path(sys.executable).with_name("headrace")), "engine", str(path), "--launch", *words]
    with open(path.parent / "launch.log", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


@contextmanager
def engine(path: Path, *words: str) -> Iterator[None]:
    """A launched engine, from when it is healthy to the end of the block, when it must leave nothing behind."""
    child = launched(path, *words)
    try:
        wait_healthy(child)
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)
    assert not is_healthy(f"http://127.0.0.1:{PORT}")
    file = engine_file(path)
    assert not Path(file.channel).parent.exists()
    left = sorted(found.name for found in (run_folder(path) / "engines").rglob("*") if found.is_file())
    assert left == ["engine.json", "log"]


def wait_healthy(child: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        assert child.poll() is None, "headrace engine ended; see launch.log"
        if is_healthy(f"http://127.0.0.1:{PORT}"):
            return
        time.sleep(0.5)
    raise AssertionError(f"no healthy server in {START_S} s")


def run_folder(path: Path) -> Path:
    return Path(yaml.safe_load(path.read_text())["run"])


def engine_file(path: Path) -> EngineFile:
    """What the run's one engine says of itself."""
    return EngineFile.read(run_folder(path) / "engines" / "0")


def endpoint(path: Path) -> Endpoint:
    """The client of a running engine."""
    found = Endpoint(run_folder(path) / "engines" / "0", 300.0, 8)
    found.reopen()
    return found


def ask(url: str, body: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """One request as it stands."""
    answer = urllib3.request("POST", f"{url}/v1/completions", json=body, timeout=timeout, retries=False)
    assert answer.status == 200, answer.data
    found: dict[str, Any] = json.loads(answer.data)
    return found
