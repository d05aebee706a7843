"""A real server in the plain file form, killed in the middle: what it left, and what is said of it."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from headrace.config import TargetConfig
from headrace.taps import parse_tap
from headrace.target.transformers_target import load_target
from headrace.target.vllm_process import is_healthy
from tests.vllm.servers import PORT, ask, engine_file, launched, run_file, wait_healthy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def processes(marker: str) -> set[int]:
    """Living processes whose command or environment names a run."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def awaited(path: Path) -> Path:
    """A file that the engine writes after it has answered."""
    for _ in range(300):
        if path.exists():
            break
        time.sleep(0.1)
    return path


def test_files_come_whole_and_a_killed_server_ends_the_command_with_its_signal(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    child = launched(path, "--file")
    try:
        wait_healthy(child)
        file = engine_file(path)
        ids = tuple(np.random.default_rng(1).integers(100, 49_000, 70).tolist())
        told = ask(file.url, {"model": file.model, "prompt": list(ids), "max_tokens": 2})["kv_transfer_params"]
        found = load_file(awaited(Path(told["hidden_states_path"])))
        assert found["token_ids"].tolist() == list(ids)
        target = load_target(TargetConfig(model="demo", dtype="float32", device="cpu"))
        wanted = target.states([np.array(ids, dtype=np.int32)], [parse_tap(name) for name in file.taps], len(ids))[0]
        lost = (found["hidden_states"] - wanted)[1:].norm() / wanted[1:].norm()
        assert float(lost) < 1e-4
        assert [path.suffix for path in Path(str(file.files)).iterdir()] == [".safetensors"]
        server = int(re.findall(r"process (\d+)", (tmp_path / "launch.log").read_text())[-1])
        os.kill(server, signal.SIGKILL)
        assert child.wait(60) == 5
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait(60)
    said = (tmp_path / "launch.log").read_text()
    assert "signal 9" in said
    assert "the last lines of its log" in said
    assert not is_healthy(f"http://127.0.0.1:{PORT}")
    assert not processes(str(tmp_path))
    with pytest.raises(ProcessLookupError):
        os.killpg(server, 0)  # none of its workers is left
    assert not Path(file.channel).parent.exists()


def test_a_model_that_does_not_fit_ends_the_command_with_what_vllm_said(tmp_path: Path) -> None:
    path = run_file(tmp_path, flags=["--max-model-len", "999999"])
    child = launched(path)
    assert child.wait(300) == 5
    said = (tmp_path / "launch.log").read_text()
    assert "exit code 1" in said
    assert "max_model_len" in said or "max-model-len" in said
