"""Learning rate and length of a run, as pure functions of the step.

In: a step, the planned number of steps, and settings. Out: a learning rate; a number of steps that fits a time limit.
Nothing here has state, so a resumed run needs only its step and the planned number of steps.
"""

import math

RESERVE = 0.03  # share of the time limit kept for saving and for steps slower than those measured


def learning_rate(step: int, num_steps: int, peak: float, min_ratio: float, warmup_ratio: float) -> float:
    """Rise linearly to `peak`, then fall along a cosine to `min_ratio * peak` at the last step.

    Args:
        step: from 0; beyond the last step the rate stays at its end.
        warmup_ratio: share of `num_steps` with a rising rate; 0 starts at the peak.
    """
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    falling = max(1, num_steps - 1 - warmup)
    share = min(1.0, (step - warmup) / falling)
    lowest = peak * min_ratio
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * share))


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
