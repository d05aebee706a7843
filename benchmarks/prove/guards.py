"""`make prove-guards`: rules of the drafter that only training can show, on the demo's states.

In: a run folder with prepared set and states (`make demo` leaves one). Out: claims. Three drafters of one seed train
for the same steps on the same samples: with their states, with the states of each micro-batch shuffled among its
tokens, and without states. Shuffled states must be worth no more than none. A fourth overfits one repeated sample.

usage: guards.py RUN_FOLDER [STEPS]
"""

import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from claims import Claims

from headrace.config import RunFolder, load_run_file
from headrace.drafter.acceptance import teacher_forced
from headrace.drafter.model import Drafter
from headrace.train.assemble import Parts, assemble
from headrace.train.batches import Step, TrainSample, training_steps
from headrace.train.heldout import HeldOut
from headrace.train.optimizer import build_optimizer, set_learning_rate
from headrace.train.schedule import learning_rate
from headrace.train.step import take_step

NUM_HELDOUT = 40
OVERFIT_STEPS = 120


def shuffled(features: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The same rows, dealt to other tokens of other samples."""
    rows = torch.cat(features)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return list(rows.split([len(f) for f in features]))


def spoil(step: Step, seed: int) -> Step:
    """A step whose states are shuffled inside each micro-batch."""
    micro = []
    for batch in step.micro:
        features = shuffled([s.features_TF for s in batch], seed)
        micro.append([dataclasses.replace(s, features_TF=f) for s, f in zip(batch, features, strict=True)])
    return dataclasses.replace(step, micro=micro)


def train_arm(parts: Parts, num_steps: int, shuffle: bool) -> Drafter:
    """Train one arm on the run's own order."""
    drafter = parts.new_drafter(parts.train.seed)
    optimizer = build_optimizer(drafter, parts.train)
    steps = training_steps(parts.plan, parts.reader, parts.prepared, parts.train, (0, 0), set())
    for number in range(num_steps):
        set_learning_rate(optimizer, learning_rate(number, num_steps, parts.train))
        step = next(steps)
        take_step(drafter, optimizer, parts.head, spoil(step, number) if shuffle else step, parts.train)
    steps.close()
    return drafter.eval()


def tau_of(drafter: Drafter, parts: Parts, shuffle: bool) -> float:
    """Held-out τ, teacher-forced."""
    held = HeldOut.read(parts.reader, parts.prepared, NUM_HELDOUT)
    features = shuffled(held.features, 0) if shuffle else held.features
    with torch.autocast("cpu", torch.bfloat16, enabled=parts.train.autocast is True):
        return teacher_forced(drafter, features, held.samples, parts.head).tau


def overfit(parts: Parts) -> float:
    """τ on one sample after training on nothing else."""
    row = int(parts.plan.rows(0)[0])
    steps = training_steps(parts.plan, parts.reader, parts.prepared, parts.train, (0, 0), set())
    own = next(s for batch in next(steps).micro for s in batch if s.sample.row == row)
    steps.close()
    drafter = parts.new_drafter(0)
    optimizer = build_optimizer(drafter, parts.train)
    eligible = torch.nonzero(torch.from_numpy(own.sample.loss_mask[:-1] * own.sample.loss_mask[1:]))[:, 0].numpy()
    sample: TrainSample = dataclasses.replace(own, anchors_A=eligible)
    for number in range(OVERFIT_STEPS):
        set_learning_rate(optimizer, learning_rate(number, OVERFIT_STEPS, parts.train))
        take_step(drafter, optimizer, parts.head, Step(0, 0, 1, [[sample]]), parts.train)
    with torch.autocast("cpu", torch.bfloat16, enabled=parts.train.autocast is True):
        return teacher_forced(drafter.eval(), [sample.features_TF], [sample.sample], parts.head).tau


def main(run: Path, num_steps: int) -> None:
    """Train the arms and compare."""
    torch.set_flush_denormal(True)
    cfg = load_run_file(Path("examples/demo.yaml"), [f"run={run}"]).run
    folder = RunFolder(run)
    states, none = assemble(cfg, folder, True), assemble(cfg, folder, False)
    claims = Claims("guards that training shows")
    reached, block = overfit(states), states.shape.block_size
    claims.add(
        "overfitting one repeated sample", f"τ above {block / 2:g}, half a block", f"{reached:.2f}", reached > block / 2
    )
    with_states = tau_of(train_arm(states, num_steps, False), states, False)
    without = tau_of(train_arm(none, num_steps, False), none, False)
    spoilt = tau_of(train_arm(states, num_steps, True), states, True)
    claims.add(
        f"τ with shuffled states, after {num_steps} steps",
        f"within 5 % of no states ({without:.3f})",
        f"{spoilt:.3f} ({spoilt / without - 1:+.1%})",
        abs(spoilt / without - 1) <= 0.05,
    )
    claims.add(
        "the same states unshuffled help, so the check can fail",
        "more than 5 % above no states",
        f"{with_states:.3f} ({with_states / without - 1:+.1%})",
        with_states / without > 1.05,
    )
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 240)
