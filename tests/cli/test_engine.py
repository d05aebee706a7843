import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.target.engine_file import EngineFile
from headrace.target.vllm_process import is_healthy
from tests.capture.test_engine_launch import python, run_of, tiny

__all__ = ["python", "tiny"]  # fixtures


def run_file(root: Path, tiny: Path, python: Path) -> Path:
    cfg, _ = run_of(root, tiny, python)
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(cfg.model_dump(mode="json", exclude_unset=True)))
    return path


def test_the_command_is_printed_without_secrets(tmp_path: Path, tiny: Path, python: Path) -> None:
    path = run_file(tmp_path, tiny, python)
    done = CliRunner().invoke(app, ["engine", str(path), "--name", "x"])
    assert done.exit_code == 0, done.stderr
    assert "vllm.entrypoints.cli.main serve" in done.stdout
    assert "s3cret" not in done.stdout
    told = CliRunner().invoke(app, ["engine", str(path), "--json", "--port", "8299"])
    found = json.loads(told.stdout)
    assert found["url"] == "http://127.0.0.1:8299"
    assert EngineFile.read(Path(found["engine"])).url == found["url"]
    for file in Path(tmp_path).rglob("engine.json"):
        Path(EngineFile.read(file).channel).parent.rmdir()


def test_sigterm_ends_the_server_too(tmp_path: Path, tiny: Path, python: Path) -> None:
    path = run_file(tmp_path, tiny, python)
    command = [str(Path(sys.executable).with_name("headrace")), "engine", str(path), "--launch"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file = tmp_path / "run" / "engines" / "0" / "engine.json"
    for _ in range(600):
        if file.exists() and is_healthy(EngineFile.read(file).url):
            break
        assert child.poll() is None, child.communicate()
        time.sleep(0.1)
    engine = EngineFile.read(file)
    os.kill(child.pid, signal.SIGTERM)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert not is_healthy(engine.url)
    assert not Path(engine.channel).parent.exists()


def test_no_vllm_is_an_error_with_the_way_out(tmp_path: Path, tiny: Path, python: Path) -> None:
    path = run_file(tmp_path, tiny, python)
    done = CliRunner().invoke(app, ["engine", str(path), "--set", "engine.python=/nowhere/python"])
    assert done.exit_code == 5
    assert "engine.python" in done.stderr
