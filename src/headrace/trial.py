"""A short capture and a few training steps, timed, so that a plan rests on this machine and target.

In: a run file, its prepared set and a loaded target. Out: a `Measurement` for `headrace plan`. Each run captures whole
capture groups, spread over the set, into a store of its own and trains on them; everything is done by the stages' own
code and removed afterwards.
"""

import math
import platform
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from headrace.capture.capture import capture, capture_taps
from headrace.codec.basis import Basis
from headrace.codec.registry import save_codec
from headrace.codec.spec import is_latent, short_spec
from headrace.config import RunFile, RunFolder
from headrace.drafter.model import Drafter
from headrace.order import capture_groups
from headrace.plan.inputs import Measurement
from headrace.plan.measure import from_timings
from headrace.prepare.prepared import PreparedSet, drafts_of, write_prepared
from headrace.progress import Progress
from headrace.raw_slice import HELDOUT_SHARE, chosen_codec, with_setting
from headrace.source import Hole, Position
from headrace.target.base import Target
from headrace.train.assemble import Parts, assemble
from headrace.train.batches import training_steps
from headrace.train.checkpoint import Checkpoint, RunState, save_checkpoint
from headrace.train.heldout import HeldOut
from headrace.train.loop import numerics
from headrace.train.optimizer import build_optimizer, moments
from headrace.train.step import take_step

NUM_RUNS = 3
RUN_SECONDS = 8.0  # what one run of capture, or of training, should take
WARM_STEPS = 2
MOST_STEPS = 50
EVALUATED = 8  # samples whose held-out evaluation is timed


@dataclass(frozen=True)
class TrainTiming:
    """One run of a few steps: tokens and seconds of the steps; seconds of what a run pays once, and per evaluation."""

    num_tokens: int
    step_s: float
    begin_s: float
    evaluate_s: float
    save_s: float


def measure(cfg: RunFile, folder: RunFolder, target: Target, target_load_s: float, progress: Progress) -> Measurement:
    """Time three short captures and three short trainings; the plan takes their medians.

    Args:
        target_load_s: seconds that loading the target took; every capture pays them once, and a raw slice where its
            codec is yet to be fitted.
    Raises: what capture and training raise.
    """
    prepared = PreparedSet.open(folder.prepared)
    root = folder.root / "trial"
    shutil.rmtree(root, ignore_errors=True)
    slice_tokens = cfg.capture.fit_tokens * (1 + HELDOUT_SHARE) if is_latent(cfg.capture.codec) else 0.0
    try:
        cfg = _with_stand_in(cfg, folder, target, root / "codec", progress)
        captured: list[tuple[float, float]] = []
        trained: list[TrainTiming] = []
        groups_per_run = _groups_per_run(cfg, prepared, root / "warm-up", target, progress)
        for number, rows in enumerate(_choose(cfg, prepared, groups_per_run)):
            one = RunFolder(root / str(number))
            _write_part(one.prepared, prepared, rows)
            captured.append(_time_capture(cfg, one, target, progress))
            trained.append(_time_training(cfg, one))
            shutil.rmtree(one.root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    slice_s = min(slice_tokens, float(prepared.lengths.sum())) * float(np.median([s / n for n, s in captured]))
    return from_timings(
        machine=_machine(),
        date=datetime.now(UTC).date().isoformat(),
        capture=captured,
        train=[(t.num_tokens, t.step_s) for t in trained],
        capture_fixed_s=target_load_s + slice_s,
        train_fixed_s=_fixed(cfg, prepared, trained),
    )


def _with_stand_in(cfg: RunFile, folder: RunFolder, target: Target, out: Path, progress: Progress) -> RunFile:
    """The run file with a codec that can be timed: a latent that is yet to be fitted gets directions drawn at random,
    which cost what fitted ones do; `auto` is chosen as the capture will.
    """
    cfg = chosen_codec(cfg, folder, target, progress)
    if not is_latent(cfg.capture.codec):
        return cfg
    num_taps = len(capture_taps(cfg, target.spec.num_blocks))
    spec = short_spec(cfg.capture.codec, num_taps, target.spec.hidden_size, cfg.states_dtype)
    drawn = torch.randn(spec.num_features, spec.width, generator=torch.Generator().manual_seed(0)) * spec.width**-0.5
    save_codec(spec, Basis(torch.ones(num_taps), torch.zeros(spec.num_features), drawn), out)
    return with_setting(cfg, str(out))


def _groups_per_run(cfg: RunFile, prepared: PreparedSet, where: Path, target: Target, progress: Progress) -> int:
    """How many capture groups make a run long enough; the first pass over one also warms the target up."""
    first = _choose(cfg, prepared, 1)[0]
    one = RunFolder(where)
    _write_part(one.prepared, prepared, first)
    _, seconds = _time_capture(cfg, one, target, progress)
    return max(1, math.ceil(RUN_SECONDS / seconds))


def _choose(cfg: RunFile, prepared: PreparedSet, groups_per_run: int) -> list[list[int]]:
    """Rows of each run: whole capture groups, evenly spaced over the set; runs share groups where there are too few."""
    groups = capture_groups(prepared.lengths, cfg.order.window_samples, cfg.capture.group_tokens)
    wanted = min(groups_per_run, len(groups))
    runs = []
    for number in range(NUM_RUNS):
        places = (np.arange(wanted) * NUM_RUNS + number) * len(groups) / (wanted * NUM_RUNS)
        runs.append(sorted({row for place in places.astype(int) for row in groups[place].rows}))
    return runs


def _write_part(folder: Path, prepared: PreparedSet, rows: list[int]) -> None:
    """A prepared set of some rows, none of them held out, so that every token can be trained on."""
    trained = (replace(draft, heldout=False) for draft in drafts_of(prepared, rows))
    write_prepared(folder, trained, {"fingerprint": prepared.fingerprint})


def _time_capture(cfg: RunFile, folder: RunFolder, target: Target, progress: Progress) -> tuple[float, float]:
    began = time.monotonic()
    num_tokens = capture(cfg, folder, target, progress)["num_tokens"]
    return float(num_tokens), time.monotonic() - began


def _time_training(cfg: RunFile, folder: RunFolder) -> TrainTiming:
    began = time.monotonic()
    parts = assemble(cfg, folder, cfg.drafter.features)
    with closing(parts), numerics(parts.train.threads):
        drafter = parts.new_drafter(parts.train.seed)
        optimizer = build_optimizer(drafter, parts.train)
        begin_s = time.monotonic() - began
        evaluate_s = _time_evaluation(parts, drafter)
        num_tokens, step_s = _time_steps(parts, drafter, optimizer)
        began = time.monotonic()
        weights = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
        checkpoint = Checkpoint(weights, moments(optimizer, drafter), RunState(1, 0, 0, 1))
        save_checkpoint(folder.train(), checkpoint, best=True)
        return TrainTiming(num_tokens, step_s, begin_s, evaluate_s, time.monotonic() - began)


def _time_evaluation(parts: Parts, drafter: Drafter) -> float:
    """Seconds of evaluating one sample."""
    rows = range(min(EVALUATED, parts.prepared.num_samples))
    read = parts.reader.read(Position(0, -1, row, parts.prepared.sample_id(row)) for row in rows)
    found = [item for item in read if not isinstance(item, Hole)]
    heldout = HeldOut([item.sample for item in found], [item.features_TF for item in found])
    began = time.monotonic()
    heldout.tau(drafter, parts.head, parts.train.autocast is True)
    return (time.monotonic() - began) / len(found)


def _time_steps(parts: Parts, drafter: Drafter, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Tokens and seconds of some steps, after a few that warm up."""
    num_tokens, spent, number = 0, 0.0, 0
    while spent < RUN_SECONDS and number < MOST_STEPS + WARM_STEPS:  # a short part is gone through again
        steps = training_steps(parts.plan, parts.reader, parts.prepared, parts.train, (0, 0), set())
        with closing(steps):
            began = time.monotonic()
            for step in steps:
                take_step(drafter, optimizer, parts.head, step, parts.train)
                number += 1
                now = time.monotonic()
                if number > WARM_STEPS:
                    num_tokens, spent = num_tokens + step.num_tokens, spent + now - began
                began = now
                if spent >= RUN_SECONDS or number >= MOST_STEPS + WARM_STEPS:
                    break
    return num_tokens, spent


def _fixed(cfg: RunFile, prepared: PreparedSet, timed: list[TrainTiming]) -> float:
    """Seconds of a whole training beside its steps: beginning, evaluations and checkpoints."""
    trained = int(prepared.lengths[~prepared.heldout].sum())
    num_steps = math.ceil(trained * cfg.train.epochs / cfg.train.step_tokens)
    evaluations = 1 + math.ceil(num_steps / cfg.train.eval_every)
    evaluated = min(cfg.train.eval_samples, int(prepared.heldout.sum()))
    begin_s, evaluate_s, save_s = (
        float(np.median([getattr(t, name) for t in timed])) for name in ("begin_s", "evaluate_s", "save_s")
    )
    return begin_s + evaluations * (evaluated * evaluate_s + (save_s if evaluated else 0.0))


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
