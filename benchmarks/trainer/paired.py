"""headrace's trainer beside speculators 0.9.0's: same states, samples, anchors, steps and first weights; paired seeds.

In: a run folder with the demo's prepared set and states captured with `capture.final_state`, and the Python of an
environment with speculators 0.9.0. Out: `results.jsonl`, one line for each arm, seed and point of the curve: held-out τ
(teacher-forced, the serving rule), steps and processor seconds; `summary.json` and `curves.svg`. What is done is not
done again, so a killed comparison goes on.

Arms: `headrace`, with Muon; `headrace-adamw`, with the rival's optimiser and rate; `speculators`; and `headrace-long`,
Muon with a sampled vocabulary for as many steps as fit into the processor seconds of the rival's. Every arm's rate
rises and falls over its own steps. One thread each, so that processor seconds are what the steps would take on a quiet
machine.

usage: paired.py RUN_FOLDER RIVAL_PYTHON OUT [--seeds N] [--steps N] [--points N] [--anchors N] [--block N]
"""

import argparse
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import draw, ends, summarise
from safetensors.torch import load_file, save_file

from headrace.config import RunFile, RunFolder, load_run_file
from headrace.drafter.anchors import anchor_rng
from headrace.drafter.model import Drafter
from headrace.files import append_json_line, write_json
from headrace.taps import parse_tap, to_zlab
from headrace.target.transformers_target import target_folder
from headrace.token_rule import eligible_anchors
from headrace.train.assemble import Parts, assemble
from headrace.train.batches import Step, TrainSample, training_steps
from headrace.train.heldout import HeldOut
from headrace.train.loop import numerics
from headrace.train.optimizer import build_optimizer, set_learning_rate
from headrace.train.schedule import learning_rate
from headrace.train.step import take_step

HERE = Path(__file__).parent
HELD_OUT = 100
PACE_STEPS = 12  # by which the long arm's pace is measured
SAMPLED = 8192  # rows of the head that `headrace-long` looks at
RATES = {"headrace": 5e-3, "headrace-adamw": 2e-3, "speculators": 2e-3, "headrace-long": 5e-3}
ARMS = tuple(RATES)


def settings(args: argparse.Namespace, seed: int, arm: str) -> RunFile:
    """The run file of an arm."""
    muon = arm in ("headrace", "headrace-long")
    flags = [
        "epochs=1000", "step_tokens=1024", "micro_tokens=1024", f"anchors={args.anchors}", f"seed={seed}", "threads=1",
        "autocast=false", f"lr={RATES[arm]}", f"optimizer={'muon' if muon else 'adamw'}",
    ]  # fmt: skip
    flags += [f"sampled_vocabulary={SAMPLED}"] if arm == "headrace-long" else []
    own = [f"train.{flag}" for flag in flags] + [f"order.seed={seed}", f"drafter.block_size={args.block}"]
    return load_run_file(None, [*own, f"drafter.num_layers={args.layers}"]).run


def packs(parts: Parts, num: int) -> list[Step]:
    """The steps, their anchors only where a whole block lies in the answer: there both losses have the same labels."""
    found: list[Step] = []
    steps = training_steps(parts.plan, parts.reader, parts.prepared, parts.train, (0, 0), set())
    for step in steps:
        samples = []
        for one in step.micro[0]:
            whole = eligible_anchors(one.sample.loss_mask)
            whole = whole[whole + parts.shape.block_size <= one.sample.num_tokens]
            rng = anchor_rng(parts.train.seed, step.epoch, one.sample.row)
            own = np.sort(rng.permutation(whole)[: parts.train.anchors])
            if len(own):
                samples.append(TrainSample(one.sample, one.features_TF, own, one.final_TH))
        found.append(Step(step.epoch, step.start, step.end, [samples]))
        if len(found) == num:
            steps.close()
            return found
    raise SystemExit(f"{num} steps were asked for, the run has {len(found)}")


def write_packs(parts: Parts, steps: list[Step], points: list[int], weights: Drafter, arm: str, out: Path) -> None:
    """The same steps as the rival reads them."""
    out.mkdir(parents=True)
    save_file({n: p.detach().clone() for n, p in weights.named_parameters()}, out / "weights.safetensors")
    own = parts.train.model_copy(update={"lr": RATES[arm]})
    told = {
        "shape": json.dumps(parts.shape.to_json()),
        "target": str(target_folder("demo")),
        "zlab_ids": json.dumps([to_zlab(parse_tap(t), parts.shape.num_target_layers) for t in parts.shape.taps]),
        "lr": RATES[arm],
        "rates": [learning_rate(i, len(steps), own) for i in range(len(steps))],
        "points": points,
    }
    write_json(out / "told.json", told)
    for number, step in enumerate(steps, 1):
        samples = step.micro[0]
        starts = np.cumsum([0, *(s.sample.num_tokens for s in samples[:-1])])
        tensors = {
            "ids": torch.from_numpy(np.concatenate([s.sample.input_ids for s in samples]).astype(np.int64)),
            "mask": torch.from_numpy(np.concatenate([s.sample.loss_mask for s in samples])),
            "lengths": torch.tensor([s.sample.num_tokens for s in samples]),
            "features": torch.cat([padded(s.features_TF, s.sample.num_tokens) for s in samples]),
            "last": torch.cat([padded(s.final_TH, s.sample.num_tokens) for s in samples]),
            "anchors": torch.from_numpy(
                np.concatenate([s.anchors_A + at for s, at in zip(samples, starts, strict=True)])
            ),
        }
        save_file(tensors, out / f"step_{number:05d}.safetensors")


def padded(states: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Rows for every token: what no block reads is zero."""
    return torch.nn.functional.pad(states, (0, 0, 0, num_tokens - len(states)))


def ours(parts: Parts, steps: list[Step], points: list[int], heldout: HeldOut) -> list[dict[str, Any]]:
    """Train one arm of ours; its points."""
    found = []
    with numerics(1):
        drafter = parts.new_drafter(parts.train.seed)
        optimizer = build_optimizer(drafter, parts.train)
        spent = 0.0
        for number, step in enumerate(steps, 1):
            began = time.process_time()
            set_learning_rate(optimizer, learning_rate(number - 1, len(steps), parts.train))
            figures = take_step(drafter, optimizer, parts.head, step, parts.train)
            spent += time.process_time() - began
            if number in points:
                tau = heldout.tau(drafter, parts.head, False)
                assert figures is not None
                found.append({"step": number, "loss": figures.loss, "cpu_s": round(spent, 2), "tau": tau})
    return found


def rival(parts: Parts, steps: list[Step], points: list[int], heldout: HeldOut, python: str, out: Path) -> list[Any]:
    """Train the rival's arm in a process of its own; its points, judged by our τ on its weights."""
    shutil.rmtree(out, ignore_errors=True)
    write_packs(parts, steps, points, Drafter(parts.shape, parts.train.seed), "speculators", out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [python, str(HERE / "rival_train.py"), str(out), str(out / "made"), "float32"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = []
    drafter = Drafter(parts.shape, 0)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            point = json.loads(line)
            drafter.load_state_dict(load_file(out / "made" / f"at_{point['step']:05d}.safetensors"), strict=False)
            found.append({**point, "tau": heldout.tau(drafter, parts.head, False)})
    shutil.rmtree(out)
    return found


def run_arm(args: argparse.Namespace, seed: int, arm: str, num_steps: int) -> None:
    """Train and judge one arm; its lines go to results.jsonl together."""
    parts = assemble(settings(args, seed, arm), RunFolder(args.run), True)
    points = sorted({round(num_steps * (i + 1) / args.points) for i in range(args.points)})
    heldout = HeldOut.read(parts.reader, parts.prepared, HELD_OUT)
    steps = packs(parts, num_steps)
    scratch = args.out / f"{arm}-{seed}"
    made = (
        rival(parts, steps, points, heldout, args.rival_python, scratch)
        if arm == "speculators"
        else ours(parts, steps, points, heldout)
    )
    parts.close()
    for point in made:
        append_json_line(args.out / "results.jsonl", {"arm": arm, "seed": seed, "of": num_steps, **point})
    print(f"{arm} seed {seed}: " + ", ".join(f"{p['tau']:.3f} at {p['step']}" for p in made), flush=True)


def main() -> None:
    """Parse, run what is missing, sum up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("rival_python")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for arm in args.arms:
            made = read_lines(args.out)
            own = [x for x in made if x["arm"] == arm and x["seed"] == seed and x["step"] == x["of"]]
            if not any(arm == "headrace-long" or x["of"] == args.steps for x in own):
                run_arm(args, seed, arm, args.steps if arm != "headrace-long" else equal_time(args, made, seed))
    made = read_lines(args.out)
    summary = {"steps": args.steps, "anchors": args.anchors, "block": args.block, "layers": args.layers}
    summary["arms"] = summarise(made)
    write_json(args.out / "summary.json", summary)
    draw(made, args.out / "curves.svg")
    print(json.dumps(summary, indent=1))


def read_lines(out: Path) -> list[dict[str, Any]]:
    """What is done."""
    lines = out / "results.jsonl"
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def equal_time(args: argparse.Namespace, made: list[dict[str, Any]], seed: int) -> int:
    """Steps of the long arm in the processor seconds that the rival took, by the pace of its first few."""
    parts = assemble(settings(args, seed, "headrace-long"), RunFolder(args.run), True)
    drafter = parts.new_drafter(seed)
    optimizer = build_optimizer(drafter, parts.train)
    each = []
    with numerics(1):
        for step in packs(parts, PACE_STEPS):
            began = time.process_time()
            take_step(drafter, optimizer, parts.head, step, parts.train)
            each.append(time.process_time() - began)
    parts.close()
    seconds = float(ends(made, "speculators")[seed]["cpu_s"])
    return max(int(args.steps), int(seconds / float(np.median(each))))


if __name__ == "__main__":
    main()
