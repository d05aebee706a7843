"""The simulated trainer beside a real one: two processes over gloo, fed by a source that takes a fixed time a record.

In: a folder to work in. Out: claims as JSON: the share of time spent waiting, measured and simulated, at two speeds of
the source. The speed of the trainers is measured in a run of its own, with a source that does not wait.

usage: check.py FOLDER
"""

import json
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np
from model import Simulation, World

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))

from tests.train.launch import Launch, launch  # noqa: E402
from tests.train.runs import make_run  # noqa: E402

from headrace.config import RunFolder  # noqa: E402
from headrace.files import read_json_lines  # noqa: E402
from headrace.prepare.prepared import PreparedSet  # noqa: E402
from headrace.testing.tiny_target import save_tiny_target  # noqa: E402

SAMPLES, HELDOUT, STEP_TOKENS, WINDOW = 220, 2, 280, 4
RATIOS = (0.5, 1.5, 3.0)  # time that a rank's records take, by the time that its step takes
WITHIN = 0.12
TRAIN = {"epochs": 1, "step_tokens": STEP_TOKENS, "micro_tokens": 140, "read_ahead": 8, "eval_every": 1000}


def main(folder: Path) -> None:
    """Measure, simulate, compare."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = str(save_tiny_target(folder / "target"))
    made = make_run(folder / "made", folder / "target", SAMPLES, HELDOUT)
    prepared = PreparedSet.open(made.prepared)
    lengths = prepared.lengths[~prepared.heldout]
    step_s = _measured(folder, target, {})[1]
    records = STEP_TOKENS / float(lengths.mean()) / 2
    rows = []
    for ratio in RATIOS:
        record_s = ratio * step_s / records
        found = _measured(folder, target, {"rank": None, "what": "slow", "at": 0, "seconds": record_s})[0]
        world = World(
            num_ranks=2, num_servers=2, rank_rate=STEP_TOKENS / 2 / step_s, server_rate=1e12, bytes_per_token=512,
            server_link=1e12, node_link=1e12, step_tokens=STEP_TOKENS, window_samples=WINDOW,
            ahead_tokens=8 / records, record_s=record_s,
        )  # fmt: skip
        simulated = Simulation(world, np.asarray(lengths), owner=lambda _, rank: rank)
        share = simulated.run(len(simulated.steps)).wait_share
        claim = f"two processes, records {ratio:.1f} times as slow as steps: share of time waiting, simulated and real"
        told = f"{share:.2f} simulated, {found:.2f} measured"
        rows.append((claim, f"within {WITHIN}", told, abs(share - found) <= WITHIN))
    print(json.dumps(rows))


def _measured(folder: Path, target: str, trouble: dict[str, object]) -> tuple[float, float]:
    """The share of time that steps waited, and the median time of a step without its wait."""
    root = folder / "run"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder / "made", root)
    launch([Launch(2, str(root), target, TRAIN, trouble)])
    lines = [line for line in read_json_lines(RunFolder(root).train() / "metrics.jsonl") if line["step"]]
    lines = lines[len(lines) // 4 :]
    seconds = [STEP_TOKENS / line["tokens_s"] for line in lines]
    waits = [line["data_wait_share"] * own for line, own in zip(lines, seconds, strict=True)]
    worked = [own - wait for own, wait in zip(seconds, waits, strict=True)]
    return sum(waits) / sum(seconds), statistics.median(worked)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
