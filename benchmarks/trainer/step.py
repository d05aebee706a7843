"""The training step beside speculators 0.9.0's: same weights, states, anchors, block, threads; alternating, medians.

In: a run folder with the demo's prepared set and the Python of an environment with speculators 0.9.0. Out: a JSON
result (printed, and written where asked): seconds a step, supervised positions a second, losses of the first step, peak
memory.

usage: step.py RUN_FOLDER RIVAL_PYTHON [--steps N] [--layers N] [--block N] [--out FILE]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from inputs import write_inputs

from headrace.target.device import fast_bfloat16

HERE = Path(__file__).parent
ANCHORS = [64, 512]
WARM = 2


class Worker:
    """One trainer in a process of its own, idle between its steps."""

    def __init__(self, python: str, script: str, inputs: Path, anchors: int, dtype: str) -> None:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        command = [python, str(HERE / script), str(inputs), str(anchors), dtype]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._read()

    def step(self, what: str = "step") -> dict[str, Any]:
        """Make one step, or one with a `profile`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self._process.args} ended without an answer")


def compare(inputs: Path, rival_python: str, anchors: int, steps: int, dtype: str) -> dict[str, Any]:
    """Alternate both trainers; medians of the steps after the first WARM."""
    workers = {"ours": Worker(sys.executable, "ours.py", inputs, anchors, dtype)}
    workers["rival"] = Worker(rival_python, "rival.py", inputs, anchors, dtype)
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(WARM + steps):
        for name, worker in workers.items():
            made[name].append(worker.step())
    profiles = {name: worker.step("profile")["profile"] for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    result: dict[str, Any] = {"anchors": anchors}
    for name, own in made.items():
        seconds = [step["seconds"] for step in own[WARM:]]
        result[name] = {
            "seconds": statistics.median(seconds),
            "spread": [min(seconds), max(seconds)],
            "positions_s": own[0]["supervised"] / statistics.median(seconds),
            "first_loss": own[0]["loss"],
            "supervised": own[0]["supervised"],
            "peak_bytes": own[-1]["peak_bytes"],
            "profile": profiles[name],
        }
    pairs = zip(made["ours"][WARM:], made["rival"][WARM:], strict=True)
    result["ratio"] = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
    return result


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("rival_python")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = "bfloat16" if fast_bfloat16(torch.device("cpu")) else "float32"
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.safetensors"
        write_inputs(args.run, inputs, args.layers, args.block, ANCHORS)
        found = [compare(inputs, args.rival_python, num, args.steps, dtype) for num in ANCHORS]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "dtype": dtype,
        "layers": args.layers,
        "block": args.block,
        "steps": args.steps,
        "results": found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
