import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.testing.fake_engine import CHUNK, FakeEngine
from headrace.testing.tiny_target import save_tiny_target
from tests.capture.conftest import write_set
from tests.engines import RAW, TAPS


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of a tiny target with samples longer than a chunk of the fake engine."""
    model = save_tiny_target(tmp_path / "model", "glm4", tied=False)
    write_set(tmp_path / "run" / "prepared", (40, 36, 44, 38), trained=True)
    settings = {
        "run": str(tmp_path / "run"),
        "target": {"model": str(model), "dtype": "float32", "taps": list(TAPS), "engine": "vllm"},
        "engine": {"flags": ["--max-num-batched-tokens", str(CHUNK)], "timeout_s": 10},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_probe_prints_findings_and_fails_with_cause_and_fix(run_file: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    with FakeEngine(tmp_path / "run" / "engines" / "a", model, TAPS, RAW) as engine:
        done = CliRunner().invoke(app, ["probe", str(run_file), "--json"])
        assert done.exit_code == 0, done.output
        assert all(finding["ok"] for finding in json.loads(done.stdout))
        engine.fault = "off_by_one"
        done = CliRunner().invoke(app, ["probe", str(run_file), "--json"])
    assert done.exit_code == 6
    wrong = [finding for finding in json.loads(done.stdout) if not finding["ok"]]
    assert {"logprobs", "taps", "requests"} == {finding["part"] for finding in wrong}
    told = " ".join(done.stderr.split())
    assert "one block early" in told
    assert "start the engine with headrace engine" in told
    assert json.loads((tmp_path / "run" / "probe.json").read_text())["ok"] is False


def test_a_probe_without_engines_says_how_to_start_one(run_file: Path) -> None:
    done = CliRunner().invoke(app, ["probe", str(run_file)])
    assert done.exit_code == 5
    assert "headrace engine RUN.yaml --launch" in " ".join(done.stderr.split())
