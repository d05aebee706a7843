"""The comparison that the trainer's defaults rest on: one setting changed at a time, two seeds an arm, equal steps.

In: a run folder with a prepared set and its states. Out: in OUT one run folder for each arm and seed, made by
`headrace train` itself, and `table.md`: held-out τ (teacher-forced) of every arm. Arms that are done are not done
again; a killed one goes on from its checkpoint.

usage: defaults.py RUN_FOLDER OUT [--steps N] [--seeds N] [--lane K/N]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

BASE = {"optimizer": "muon", "lr": "5e-3", "loss": "dpace", "scale_taps": "true", "schedule": "cosine", "ema": "0"}
ARMS: dict[str, dict[str, str]] = {
    "defaults": {},
    "CE with decay, gamma 4": {"loss": "decay"},
    "taps not scaled": {"scale_taps": "false"},
    "whole vocabulary": {"sampled_vocabulary": "null"},
    "Muon 2e-3": {"lr": "2e-3"},
    "Muon 1e-2": {"lr": "1e-2"},
    "AdamW 5e-4": {"optimizer": "adamw", "lr": "5e-4"},
    "AdamW 1e-3": {"optimizer": "adamw", "lr": "1e-3"},
    "AdamW 2e-3": {"optimizer": "adamw", "lr": "2e-3"},
    "AdamW 4e-3": {"optimizer": "adamw", "lr": "4e-3"},
    "AdamW 2e-3, taps not scaled": {"optimizer": "adamw", "lr": "2e-3", "scale_taps": "false"},
}
SHARED = ["epochs=1000", "step_tokens=1024", "micro_tokens=1024", "threads=1", "tensorboard=false"]
SHARED += ["group_blocks=256", "sampled_vocabulary=8192"]


def train(run: Path, where: Path, changes: dict[str, str], seed: int, args: argparse.Namespace) -> None:
    """Train one arm where it is not done."""
    where.mkdir(parents=True, exist_ok=True)
    for name in ("prepared", "states"):
        if not (where / name).exists():
            (where / name).symlink_to((run / name).resolve())
    settings = {**BASE, **changes, "seed": str(seed), "anchors": str(args.anchors), "max_steps": str(args.steps)}
    flags = [f"train.{flag}" for flag in SHARED] + [f"train.{key}={value}" for key, value in settings.items()]
    flags += [f"train.eval_every={args.steps}", "train.eval_samples=100", f"order.seed={seed}", "floor=false"]
    flags += [f"drafter.block_size={args.block}", f"drafter.num_layers={args.layers}", f"run={where}"]
    command = [str(Path(sys.executable).with_name("headrace")), "train"]
    subprocess.run([*command, *(part for flag in flags for part in ("--set", flag))], check=True)


def tau(where: Path) -> float | None:
    """τ of a finished arm."""
    stage = where / "train" / "stage.json"
    if not stage.exists():
        return None
    found = json.loads(stage.read_text())
    return float(found["summary"]["tau"]) if found["finished"] else None


def table(out: Path, args: argparse.Namespace) -> str:
    """The table in Markdown, of what is done."""
    lines = ["| arm | τ, each seed | mean | against the defaults |", "|---|---|---|---|"]
    base: float | None = None
    for arm in ARMS:
        each = [t for seed in range(args.seeds) if (t := tau(folder(out, arm, seed))) is not None]
        if not each:
            continue
        mean = float(np.mean(each))
        base = mean if base is None else base
        shown = ", ".join(f"{t:.3f}" for t in each)
        lines.append(f"| {arm} | {shown} | {mean:.3f} | {mean / base - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def folder(out: Path, arm: str, seed: int) -> Path:
    """Where an arm lies."""
    return out / f"{arm.replace(',', '').replace(' ', '-')}-{seed}"


def main() -> None:
    """Parse, train what is missing, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lane", default="0/1", help="K/N: every N-th arm, from K on")
    args = parser.parse_args()
    own, lanes = (int(part) for part in args.lane.split("/"))
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in ARMS]
    for arm, seed in jobs[own::lanes]:
        if tau(folder(args.out, arm, seed)) is None:
            train(args.run, folder(args.out, arm, seed), ARMS[arm], seed, args)
    (args.out / "table.md").write_text(table(args.out, args))
    print(table(args.out, args))


if __name__ == "__main__":
    main()
