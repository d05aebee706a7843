"""What the lines of a paired comparison say: a summary and one plot.

In: lines with arm, seed, step, τ and processor seconds. Out: for each arm the mean of τ at its end; the paired ratio to
the rival with a 95 % interval from a bootstrap over seeds; curves over steps and over processor seconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

RIVAL = "speculators"
COLOURS = {"headrace": "#0b6e8a", "headrace-long": "#2fa4c7", "headrace-adamw": "#7a8f3a", RIVAL: "#b4552d"}
RESAMPLES = 10_000
Lines = Sequence[dict[str, Any]]


def ends(lines: Lines, arm: str) -> dict[int, dict[str, Any]]:
    """The last point of an arm for each seed."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["arm"] == arm and line["step"] >= found.get(line["seed"], line)["step"]:
            found[line["seed"]] = line
    return found


def summarise(lines: Lines) -> dict[str, Any]:
    """For each arm: seeds, τ, steps and processor seconds (means), and where the rival ran too the ratio to its τ."""
    rival = ends(lines, RIVAL)
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(line["arm"] for line in lines):
        own = ends(lines, arm)
        both = sorted(own.keys() & rival.keys())
        found[arm] = {
            "seeds": len(own),
            **{key: round(float(np.mean([p[key] for p in own.values()])), 4) for key in ("tau", "step", "cpu_s")},
        }
        if both and arm != RIVAL:
            found[arm]["ratio"] = _ratio([own[s]["tau"] for s in both], [rival[s]["tau"] for s in both])
    return found


def _ratio(own: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    a, b = np.asarray(own), np.asarray(other)
    draws = np.random.default_rng(0).integers(0, len(a), size=(RESAMPLES, len(a)))
    low, high = np.quantile(a[draws].sum(1) / b[draws].sum(1), [0.025, 0.975])
    return {"value": round(float(a.sum() / b.sum()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def draw(lines: Lines, path: Path) -> None:
    """τ over steps and over processor seconds: each seed thin, the mean thick."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    for place, (key, label) in enumerate((("step", "steps"), ("cpu_s", "processor seconds of the steps"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for arm in dict.fromkeys(line["arm"] for line in lines):
            by_seed: dict[int, list[tuple[float, float]]] = {}
            for line in lines:
                if line["arm"] == arm:
                    by_seed.setdefault(line["seed"], [(0.0, 1.0)]).append((line[key], line["tau"]))
            whole = [sorted(points) for points in by_seed.values()]
            colour = COLOURS.get(arm, "#555555")
            for points in whole:
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.6, alpha=0.5)
            fewest = min(len(points) for points in whole)
            mean = np.mean([points[:fewest] for points in whole], axis=0)
            axes.plot(
                mean[:, 0], mean[:, 1], color=colour, linewidth=2, marker=".", label=f"{arm} ({len(whole)} seeds)"
            )
        axes.set_xlabel(label)
        axes.set_ylabel("held-out τ, teacher-forced")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
