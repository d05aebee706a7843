"""The demo's drafter in a real server: what each pass gains, and answers, are those of our own evaluation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.vllm.servers import FLAGS, PORT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

DEMO = Path(os.environ.get("HEADRACE_DEMO_RUN", "runs/demo"))


@pytest.mark.skipif(
    not (DEMO / "drafter" / "config.json").is_file(), reason=f"no exported drafter in {DEMO}; make demo"
)
def test_the_demos_drafter_gains_in_vllm_what_it_gains_here(tmp_path: Path) -> None:
    for name in ("prepared", "drafter"):
        shutil.copytree(DEMO / name, tmp_path / "run" / name)
    run = {
        "run": str(tmp_path / "run"),
        "evaluate": {"num_prompts": 3, "max_new_tokens": 24},
        "engine": {"python": vllm_python(), "port": PORT, "flags": list(FLAGS)},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    command = [str(Path(sys.executable).with_name("headrace")), "eval", str(tmp_path / "run.yaml")]
    done = subprocess.run([*command, "--engine", "vllm", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["answers_identical"]
    assert results["plain_identical"]
    assert results["num_other_counts"] == 0
    assert results["num_same_counts"] == 3 - results["num_ties"] > 0
    assert results["tau_engine"] > 1.2
    assert results["counters"]["drafts"] == results["passes_engine"]
