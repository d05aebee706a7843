"""Power loss at some of a writer's operations; `make prove-store` cuts at every one."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "store" / "power.py"


def test_power_loss_costs_nothing_that_was_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "1", "9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for claim, _, measured, holds in json.loads(done.stdout):
        assert holds, (claim, measured)
