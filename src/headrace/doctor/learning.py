"""Checks of the training itself: does it learn, from the states, and fast enough.

In: metrics of drafter and floor, and the evaluation. Out: findings, and a forecast of what more data would bring.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from headrace.doctor.evidence import Evidence, Line
from headrace.doctor.finding import Finding

ENOUGH_STEPS = 100  # fewer updates say nothing about what could be learned
TAIL = 0.2  # share of the run, at its end, that figures are averaged over
WAIT = 0.2  # share of step time spent waiting for data
NEAR = 0.05  # tokens per pass: a margin over the floor below it is none
SAME_CE = 0.03  # relative difference of cross-entropies below which the states taught nothing
LEARNED = 0.1  # hit rate of supervised slots above which a drafter has learned something
FALLEN = 0.03  # share of its best τ that a drafter may lose while it trains on
FORECAST_POINTS = 4
TIMES = (2, 4, 10)


def tail(lines: Sequence[Line], key: str) -> float | None:
    """The mean of a figure over the end of the run; None where it was not measured."""
    values = [float(line[key]) for line in lines if line.get(key) is not None]
    own = values[-max(1, math.ceil(TAIL * len(values))) :]
    return statistics.fmean(own) if own else None


def near_the_floor(run: Evidence) -> Finding | None:
    """The loss is fine and τ is that of a drafter without features: are the states unused, or the data too few?"""
    tau, floor = run.results.get("tau"), run.results.get("tau_no_features")
    hits, ce, floor_ce = tail(run.metrics, "hit_rate"), tail(run.metrics, "ce"), tail(run.floor_metrics, "ce")
    if tau is None or floor is None or ce is None or floor_ce is None or hits is None or tau <= 1.0:
        return None
    low = (run.results.get("margin_no_features") or {}).get("low", tau - floor)
    if tau - floor >= NEAR and low > 0:
        return None
    evidence = (
        f"eval: τ {tau:.3f}, without features {floor:.3f}, lower end of the margin {low:+.3f}",
        f"metrics: cross-entropy at the end {ce:.3f} with features, {floor_ce:.3f} without, {len(run.metrics)} steps",
    )
    if len(run.metrics) < ENOUGH_STEPS:
        what = f"the drafter is no better than one without features, after only {len(run.metrics)} steps"
        return Finding(
            "near-the-floor", "lack of data", what, evidence, "train longer before judging: raise train.epochs"
        )
    if ce > floor_ce * (1 - SAME_CE):
        what = "the states taught the drafter nothing: with them it learned no more than without"
        step = (
            "look whether states belong to their tokens: `headrace store verify`, then capture one sample again and "
            "compare; check taps and train.scale_taps"
        )
        return Finding("near-the-floor", "fault", what, evidence, step)
    what = "features help on the data trained on, and not on held-out prompts: the drafter learned its data by heart"
    return Finding("near-the-floor", "lack of data", what, evidence, "add chats; more epochs of these will not help")


def tau_of_one(run: Evidence) -> Finding | None:
    """τ exactly 1: not one drafted token was ever accepted, which chance alone would not do."""
    tau, hits = run.results.get("tau"), tail(run.metrics, "hit_rate")
    source = "eval"
    if tau is None and len(run.taus) > 1:
        tau, source = run.taus[-1][2], "training"
    if tau is None or tau > 1.0 or hits is None:
        return None
    evidence = (f"{source}: τ {tau:.4f}", f"metrics: hit rate {hits:.1%} of supervised slots, {len(run.metrics)} steps")
    if hits >= LEARNED:
        what = "the drafter hits in training, and no drafted token is ever accepted: what runs is not what was trained"
        step = "check the mask token, the tap names and numbers, and block slots of the export: `make prove-golden`"
        return Finding("tau-of-one", "fault", what, evidence, step)
    if len(run.metrics) < ENOUGH_STEPS:
        what = "no drafted token is accepted yet; the drafter has hardly begun"
        return Finding("tau-of-one", "lack of data", what, evidence, "train longer: raise train.epochs")
    what = "no drafted token is ever accepted, and the drafter hits nothing in training either: it does not learn"
    step = "look at the loss mask with `headrace show`, then at train.lr and the gradient norm"
    return Finding("tau-of-one", "fault", what, evidence, step)


def waits_for_data(run: Evidence) -> Finding | None:
    """The trainer stands still while records are read."""
    share = tail(run.metrics, "data_wait_share")
    if share is None or share <= WAIT:
        return None
    peak = max(float(line.get("data_wait_share", 0.0)) for line in run.metrics)
    evidence = (f"metrics: {share:.0%} of the time of the last steps, at most {peak:.0%}",)
    step = (
        "raise train.read_ahead; then smaller states (`headrace codec report`), or more updates from each: train.draws"
    )
    return Finding("waits-for-data", "speed", "training waits for its data", evidence, step)


def gets_worse(run: Evidence) -> Finding | None:
    """Held-out τ fell while training went on: the drafter learns its data by heart."""
    if len(run.taus) < 3:
        return None
    step, _, best = max(run.taus, key=lambda one: one[2])
    last_step, _, last = run.taus[-1]
    if best <= 1.0 or last >= best * (1 - FALLEN):
        return None
    evidence = (f"metrics: held-out τ {best:.3f} at step {step}, {last:.3f} at step {last_step}",)
    what = "held-out τ falls while training goes on"
    return Finding(
        "gets-worse", "lack of data", what, evidence, "add chats, or train for fewer epochs; export train/best"
    )


def forecast(run: Evidence) -> Finding | None:
    """What more data would bring, from the run's own curve: τ against the logarithm of tokens trained on.

    A straight line through the later half of the evaluations. It is an outlook, not a measurement: tokens of later
    epochs were seen before and teach less than new ones would, and a falling learning rate lifts the end of the curve.
    """
    points = [(math.log2(tokens), tau) for _, tokens, tau in run.taus if tokens > 0]
    points = points[len(points) // 2 :]
    if len(points) < FORECAST_POINTS:
        return None
    x, y = (np.array(axis) for axis in zip(*points, strict=True))
    spread = x - x.mean()
    slope = float((spread * y).sum() / (spread**2).sum())
    residual = y - y.mean() - slope * spread
    error = math.sqrt(float((residual**2).sum()) / (len(x) - 2) / float((spread**2).sum()))
    last, unit = float(y[-1]), "tokens" if run.metrics and "tokens" in run.metrics[-1] else "steps"
    grown = [f"{n}x: {last + slope * math.log2(n):.2f} (± {2 * error * math.log2(n):.2f})" for n in TIMES]
    evidence = (
        f"metrics: τ {last:.3f} after {2 ** float(x[-1]):,.0f} {unit} trained on, repeats counted",
        f"τ gained per doubling over the last {len(points)} evaluations: {slope:+.3f} (± {2 * error:.3f})",
        f"if the line held, with so many times as many {unit}: " + ", ".join(grown),
    )
    return Finding("forecast", "note", "what more data would bring", evidence, "check it with half of the data first")
