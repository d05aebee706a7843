"""The command itself, under torchrun: as docs/distributed.md says it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.config import RunFolder
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.checkpoint import load_checkpoint
from tests.train.runs import make_run, run_file

BIN = Path(sys.executable).parent


def command(root: Path, *more: str) -> list[str]:
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(BIN / "headrace"), *more[:1], str(root / "run.yaml"), *more[1:]]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    save_tiny_target(tmp_path / "target")
    make_run(tmp_path / "run", tmp_path / "target")
    cfg = run_file(tmp_path / "run", tmp_path / "target", epochs=400, eval_every=1000)
    (tmp_path / "run" / "run.yaml").write_text(json.dumps(cfg.model_dump(mode="json")))
    return tmp_path / "run"


@pytest.mark.slow
def test_train_under_torchrun_is_stopped_and_goes_on(made: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = subprocess.Popen(command(made, "train"), env=environment, stderr=subprocess.PIPE, text=True)
    metrics = RunFolder(made).train() / "metrics.jsonl"
    ended = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < ended:
        time.sleep(0.1)
    ranks.send_signal(signal.SIGTERM)
    said = ranks.communicate(timeout=60)[1]
    state = load_checkpoint(RunFolder(made).train() / "last").state
    assert state.step >= 3, said
    assert state.made_from["ranks"] == 2
    assert said.count("saved after step") == 1
    done = subprocess.run(
        command(made, "train", "--json", "--set", "train.max_seconds=2", "--set", "floor=false"),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "train.max_seconds" in done.stderr  # another setting is refused, by every rank
    shutil.rmtree(RunFolder(made).train())
    done = subprocess.run(
        command(made, "train", "--json", "--set", "train.epochs=1", "--set", "floor=false"),
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["drafter"]["num_epochs"] == 1.0  # rank 0's alone


@pytest.mark.slow
def test_only_train_is_for_torchrun(made: Path) -> None:
    done = subprocess.run(command(made, "report"), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "only `headrace train` is for torchrun" in done.stderr
