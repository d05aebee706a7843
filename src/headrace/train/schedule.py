"""Learning rate and length of a run, as pure functions of the step.

In: a step, the planned number of steps, and settings. Out: a learning rate; a number of steps that fits a time limit.
Nothing here has state, so a resumed run needs only its step and the planned number of steps.
"""

import math

from headrace.config import TrainConfig

RESERVE = 0.03  # share of the time limit kept for saving and for steps slower than those measured


def learning_rate(step: int, num_steps: int, cfg: TrainConfig) -> float:
    """Rise linearly to `cfg.peak_lr`, then fall to `cfg.min_lr_ratio` of it at the last step.

    cosine and linear fall over all steps that are left; wsd (warm-up, stable, decay; arXiv 2404.06395) stays at the
    peak and falls linearly over the last `cfg.decay_ratio` of the run.
    Args: step: from 0; beyond the last step the rate stays at its end.
    """
    warmup = math.ceil(cfg.warmup_ratio * num_steps)
    if step < warmup:
        return cfg.peak_lr * (step + 1) / warmup
    last = num_steps - 1
    start = warmup if cfg.schedule != "wsd" else max(warmup, last - math.ceil(cfg.decay_ratio * num_steps))
    share = min(1.0, max(0.0, (step - start) / max(1, last - start)))
    left = 0.5 * (1 + math.cos(math.pi * share)) if cfg.schedule == "cosine" else 1 - share
    lowest = cfg.peak_lr * cfg.min_lr_ratio
    return lowest + (cfg.peak_lr - lowest) * left


def steps_within(
    seconds_left: float, step_seconds: float, eval_seconds: float, eval_every: int, done: int, most: int
) -> int:
    """Plan how many steps a run has in all, so that it ends within `seconds_left` from now.

    Args:
        step_seconds: measured seconds of one step.
        eval_seconds: measured seconds of one evaluation; one comes every `eval_every` steps and one at the end.
        done: steps taken so far.
        most: steps without a time limit.
    Returns: between `done` + 1 and `most` (or `done`, where that is more).
    """
    usable = seconds_left * (1 - RESERVE) - eval_seconds
    per_step = max(step_seconds + eval_seconds / eval_every, 1e-9)
    return max(done, min(most, done + max(1, int(usable / per_step))))
