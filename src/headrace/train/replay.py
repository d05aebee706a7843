"""More learning from every record that is read: recent steps again, with other anchors.

In: fresh steps, in order. Out: each of them, followed by `draws` - 1 steps chosen from the last `replay_steps` fresh
ones (itself among them), whose blocks start elsewhere. A slow source is read once for several updates. What is chosen
depends on seed and position alone; a resumed run reads the recent steps again and goes on as one that never stopped.
"""

from collections import deque
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from headrace.config import TrainConfig
from headrace.drafter.anchors import anchor_rng, draw_anchors
from headrace.prepare.prepared import PreparedSet
from headrace.train.batches import Plan, Reader, Step, training_steps
from headrace.train.ranks import WHOLE, Share

_CHOICE = 1  # tells the choice of a step apart from draws of anchors


def replayed_steps(
    plan: Plan,
    reader: Reader,
    prepared: PreparedSet,
    cfg: TrainConfig,
    start: tuple[int, int, int],
    known_holes: set[int],
    share: Share = WHOLE,
    declared: Collection[int] = (),
) -> Generator[Step, None, None]:
    """Yield every step of the run from `start` = (epoch, place, draw) on.

    Args: as of `training_steps`.
    """
    begin = start[:2]
    refill = _earlier(plan, begin, cfg.replay_steps - 1) if cfg.draws > 1 else begin
    recent: deque[Step] = deque(maxlen=cfg.replay_steps)
    with closing(training_steps(plan, reader, prepared, cfg, refill, known_holes, share, declared)) as fresh:
        for step in fresh:
            recent.append(step)
            here = (step.epoch, step.start)
            if here < begin:
                continue
            for draw in range(start[2] if here == begin else 0, cfg.draws):
                yield _again(step, draw, recent, cfg) if draw else step


def _again(step: Step, draw: int, recent: Sequence[Step], cfg: TrainConfig) -> Step:
    """A recent step with anchors of its own, at the position of the fresh `step`."""
    visit = (step.epoch, step.start, draw)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([cfg.seed, *visit, _CHOICE])))
    chosen = recent[int(rng.integers(len(recent)))]
    micro = [
        [
            replace(
                s, anchors_A=draw_anchors(s.sample.loss_mask, cfg.anchors, anchor_rng(cfg.seed, *visit, s.sample.row))
            )
            for s in batch
        ]
        for batch in chosen.micro
    ]
    return replace(step, micro=micro, holes=[], waited_s=0.0, draw=draw)


def _earlier(plan: Plan, begin: tuple[int, int], count: int) -> tuple[int, int]:
    """Where the step `count` fresh steps before `begin` starts, or the run's first."""
    epoch, place = begin
    while count:
        starts = [a for a, _ in plan.steps(epoch) if a < place]
        if len(starts) >= count:
            return epoch, starts[-count]
        if epoch == 0:
            return 0, 0
        count -= len(starts)
        epoch, place = epoch - 1, len(plan.rows(epoch - 1))
    return epoch, place
