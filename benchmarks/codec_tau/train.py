"""What a codec costs in τ: drafters trained through each, paired by seed, judged as served.

In: a run folder with raw states of a prepared set. Out: in OUT `results.jsonl`, one line for each arm and seed: τ of
every held-out sample and cross-entropy, both of the exported form (codec folded into fc) on raw states; `summary.json`:
the recovered share (τ - none) / (raw - none) and the ratio τ / raw with bootstrap intervals over seeds and samples; and
`frontier.svg`. One arm at a time, in any order; a killed one goes on from its last checkpoint, so that the experiment
may be spread over many sessions.

Arms `fc:RxB` keep the directions that a pilot reads: a drafter trained on raw taps with another seed, which the screen
reads too. It lies in OUT/pilot, is made where it is missing (--pilot STEPS), and may be another folder (--drafter).

Pairing: every parameter but fc is drawn by seed and name; fc is drawn once, over scaled raw taps, and an arm with
directions P begins at fc P'. Samples, their order and their anchors are those of the seed. Arms read what a store in
that codec would give them: states are encoded and decoded as they are read.

usage: train.py RUN_FOLDER OUT --steps N [--seeds K …] [--arms NAME …] [--pilot STEPS] [--drafter FOLDER]
"""

import argparse
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from frontier import draw, summarise
from screen import FIT_TOKENS, Judge, codec_of, moments_of

from headrace.calibrate import Slice
from headrace.codec.base import Codec, RawCodec
from headrace.codec.fit import Moments
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFolder, load_run_file
from headrace.drafter.acceptance import teacher_forced
from headrace.drafter.model import Drafter
from headrace.drafter.stock import CONFIG, load_stock
from headrace.export.zlab import export_zlab
from headrace.files import append_json_line, write_atomic, write_json
from headrace.train.assemble import Parts, assemble
from headrace.train.batches import Reader, training_steps
from headrace.train.load import as_served
from headrace.train.loop import numerics
from headrace.train.optimizer import build_optimizer, moments, restore_moments, set_learning_rate
from headrace.train.schedule import learning_rate
from headrace.train.step import take_step

SAVE_S = 240.0
HELD_OUT = 60
CONTROLS = ("raw", "raw-unscaled", "full", "fp8", "3-taps", "none")
FINALISTS = ("fc:288x4", "pca:288x4", "fc:144x4", "pca:144x4", "fc:72x4")
PILOT_SEED = 1000


@dataclass(frozen=True, eq=False)
class Arm:
    """How an arm reads: a codec over raw taps (None: as they are), scaled or not; and which taps."""

    name: str
    codec: Codec | None
    quantised: bool = True
    scaled: bool = True
    taps: tuple[int, ...] | None = None


class Through:
    """A raw store read as if it had been encoded."""

    def __init__(self, raw: Codec, arm: Arm) -> None:
        self.spec, self.raw, self.arm = raw.spec, raw, arm
        self.num_scales = 1

    @property
    def num_features(self) -> int:
        """F of the arm."""
        spec: CodecSpec = self.spec
        if self.arm.taps is not None:
            return len(self.arm.taps) * spec.hidden_size
        return spec.width if self.arm.codec is None else self.arm.codec.num_features

    def features(self, payload: bytes, num_tokens: int) -> torch.Tensor:
        """What the trainer reads of one span."""
        spec: CodecSpec = self.spec
        states_TLH = self.raw.features(payload, num_tokens).view(num_tokens, spec.num_taps, spec.hidden_size)
        if self.arm.taps is not None:
            return states_TLH[:, list(self.arm.taps)].flatten(1)
        if self.arm.codec is None:
            return states_TLH.flatten(1)
        if not self.arm.quantised:
            assert isinstance(self.arm.codec, QuantisedCodec)
            return self.arm.codec.coordinates(states_TLH)
        return self.arm.codec.features(self.arm.codec.encode(states_TLH), num_tokens)


def arms(names: list[str], raw: CodecSpec, measured: Moments, fc_HW: torch.Tensor | None) -> list[Arm]:
    """The arms by name."""
    found = []
    for name in names:
        if name in ("raw", "none"):
            found.append(Arm(name, None))
        elif name == "raw-unscaled":
            found.append(Arm(name, None, scaled=False))
        elif name == "3-taps":
            found.append(Arm(name, None, taps=tuple(round(i * (raw.num_taps - 1) / 2) for i in range(3))))
        elif name == "full":
            full = codec_of(f"pca:{min(raw.width, measured.num_tokens // 4)}x8", raw, measured, torch.zeros(0))
            found.append(Arm(name, full, quantised=False))
        else:
            if name.startswith("fc") and fc_HW is None:
                raise SystemExit(f"{name} needs --drafter: whose fc is read")
            found.append(Arm(name, codec_of(name, raw, measured, torch.zeros(0) if fc_HW is None else fc_HW)))
    return found


def new_drafter(parts: Parts, arm: Arm, inverse_rms_L: torch.Tensor, num_features: int) -> Drafter:
    """Paired: drawn by name, fc through the arm's directions."""
    seed, hidden_size = parts.train.seed, parts.shape.hidden_size
    whole = Drafter(parts.shape, seed)
    shape = replace(parts.shape, num_features=num_features, features=arm.name != "none")
    drafter = Drafter(shape, seed)
    scale_W = inverse_rms_L.repeat_interleave(hidden_size)
    own = whole.fc.weight.detach()
    if arm.taps is not None:
        columns = torch.cat([torch.arange(t * hidden_size, (t + 1) * hidden_size) for t in arm.taps])
        scale, start = scale_W[columns], own[:, columns]
    elif isinstance(arm.codec, QuantisedCodec) and arm.codec.basis is not None:
        projection = arm.codec.basis.projection_RW
        assert projection is not None
        scale, start = torch.ones(num_features), own @ projection.T
    else:
        scale, start = scale_W if arm.scaled else torch.ones_like(scale_W), own
    if arm.name != "none":
        with torch.no_grad():
            drafter.feature_scale.copy_(scale)
            drafter.fc.weight.copy_(start)
    return drafter


def served(drafter: Drafter, arm: Arm, parts: Parts, raw: CodecSpec) -> Drafter:
    """The form that an engine reads raw taps with."""
    if arm.name == "none":
        return drafter
    if arm.taps is None:
        return as_served(drafter, RawCodec(raw) if arm.codec is None else arm.codec)
    whole = Drafter(parts.shape, 0)
    weights = dict(drafter.state_dict())
    fc = torch.zeros_like(whole.fc.weight)
    size = raw.hidden_size
    for place, tap in enumerate(arm.taps):
        part = slice(place * size, (place + 1) * size)
        fc[:, tap * size : (tap + 1) * size] = drafter.fc.weight.detach()[:, part] * drafter.feature_scale[part]
    whole.load_state_dict({**weights, "fc.weight": fc, "feature_scale": torch.ones(raw.width)})
    return whole.eval()


def train_arm(parts: Parts, arm: Arm, inverse_rms_L: torch.Tensor, num_steps: int, where: Path) -> Drafter:
    """Train, or go on; the checkpoint is removed by whoever keeps the result."""
    assert parts.source is not None
    through = Through(RawCodec(parts.codec.spec), arm)  # type: ignore[union-attr]
    reads = arm.name != "none"
    drafter = new_drafter(parts, arm, inverse_rms_L, through.num_features)
    optimizer = build_optimizer(drafter, parts.train)
    step_number, place = 0, (0, 0)
    if where.exists():
        saved = torch.load(where, weights_only=True)
        drafter.load_state_dict(saved["weights"])
        restore_moments(optimizer, drafter, saved["moments"])
        step_number, place = saved["step"], (saved["epoch"], saved["place"])
    reader = Reader(parts.prepared, parts.source if reads else None, through if reads else None)  # type: ignore[arg-type]
    steps = training_steps(parts.plan, reader, parts.prepared, parts.train, place, set())
    began = time.monotonic()
    for step in steps:
        set_learning_rate(optimizer, learning_rate(step_number, num_steps, parts.train))
        take_step(drafter, optimizer, parts.head, step, parts.train)
        step_number += 1
        last = step_number == num_steps
        if last or time.monotonic() - began > SAVE_S:
            epoch, at = parts.plan.after(step.epoch, step.end)
            _save(where, drafter, optimizer, step_number, epoch, at)
            began = time.monotonic()
            print(f"{arm.name} seed {parts.train.seed}: {step_number} of {num_steps} steps", flush=True)
        if last:
            break
    steps.close()
    return drafter.eval()


def parts_of(folder: RunFolder, settings: list[str], seed: int) -> Parts:
    """What an arm of a seed trains with."""
    flags = ["train.epochs=1000", "train.threads=1", *settings, f"train.seed={seed}", f"order.seed={seed}"]
    return assemble(load_run_file(None, flags).run, folder, True)


def train_pilot(folder: RunFolder, settings: list[str], inverse_rms_L: torch.Tensor, num_steps: int, out: Path) -> None:
    """A drafter on raw taps, of a seed that no arm has; written as a stock folder."""
    parts, arm = parts_of(folder, settings, PILOT_SEED), Arm("raw", None)
    where = out.with_suffix(".pt")
    with numerics(1):
        export_zlab(train_arm(parts, arm, inverse_rms_L, num_steps, where), out)
    parts.close()
    where.unlink()


def _save(where: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, step: int, epoch: int, place: int) -> None:
    out = io.BytesIO()
    content: Mapping[str, Any] = {"weights": drafter.state_dict(), "moments": moments(optimizer, drafter)}
    torch.save({**content, "step": step, "epoch": epoch, "place": place}, out)
    write_atomic(where, out.getvalue())


def judge_served(judge: Judge, drafter: Drafter) -> dict[str, Any]:
    """Passes and tokens of each held-out sample, and cross-entropy, on raw states."""
    own = replace(judge, drafter=drafter)
    features = [states.flatten(1) for states in judge.states]
    count = teacher_forced(drafter, features, judge.samples, judge.head)
    return {
        "tau": round(count.tau, 4),
        "ce": round(own._cross_entropy(features), 4),
        "tokens": [sum(g) for g in count.gained],
        "passes": [len(g) for g in count.gained],
    }


def main() -> None:
    """Parse, train what is missing, sum up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", default=[*CONTROLS, *FINALISTS])
    parser.add_argument("--pilot", type=int, default=0, help="steps of the pilot, where there is none")
    parser.add_argument("--drafter", type=Path, help="whose fc is read, instead of the pilot's")
    parser.add_argument("--set", action="append", default=[], help="train.anchors=16 and the like")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = args.out / "results.jsonl"
    folder = RunFolder(args.run)
    fitted_on, heldout = Slice(folder, False, FIT_TOKENS), Slice(folder, True, 10**9)
    raw = fitted_on.codec.spec
    measured = moments_of(fitted_on, args.out / "moments.pt")
    pilot = args.drafter or args.out / "pilot"
    if args.pilot and not (pilot / CONFIG).exists():
        train_pilot(folder, args.set, measured.inverse_rms_L, args.pilot, pilot)
    fc_HW = load_stock(pilot).fc.weight.detach().float() if (pilot / CONFIG).exists() else None
    wanted = arms(args.arms, raw, measured, fc_HW)
    rows = heldout.rows[:HELD_OUT]
    states = [own for _, (_, own) in zip(rows, heldout(), strict=False)]
    for seed in args.seeds:
        parts = parts_of(folder, args.set, seed)
        judge = Judge(Drafter(parts.shape, 0), parts.head, [heldout.prepared.sample(row) for row in rows], states)
        for arm in wanted:
            done = [json.loads(x) for x in lines.read_text().splitlines()] if lines.exists() else []
            if any((x["arm"], x["seed"], x["steps"]) == (arm.name, seed, args.steps) for x in done):
                continue
            where = args.out / f"{arm.name.replace(':', '-')}-{seed}.pt"
            with numerics(1):
                drafter = train_arm(parts, arm, measured.inverse_rms_L, args.steps, where)
                found = judge_served(judge, served(drafter, arm, parts, raw))
            size = 0.0 if arm.name == "none" else _size(arm, raw)
            told = {"arm": arm.name, "seed": seed, "steps": args.steps, "bytes_per_token": round(size, 1)}
            append_json_line(lines, {**told, **found})
            where.unlink()
            print(json.dumps({**told, "tau": found["tau"], "ce": found["ce"]}), flush=True)
        parts.close()
    made = [json.loads(x) for x in lines.read_text().splitlines()]
    summary = summarise([x for x in made if x["steps"] == args.steps])
    write_json(args.out / "summary.json", summary)
    draw(summary, args.out / "frontier.svg")
    print(json.dumps(summary, indent=1))


def _size(arm: Arm, raw: CodecSpec) -> float:
    if arm.taps is not None:
        return len(arm.taps) * raw.hidden_size * 2.0
    if arm.codec is None:
        return raw.bytes_per_token()
    return arm.codec.spec.bytes_per_token() if arm.quantised else 2.0 * arm.codec.num_features


if __name__ == "__main__":
    main()
