"""What the lines of the codec experiment say: recovered share and ratio of τ, with intervals, and one plot.

In: lines with arm, seed, bytes a token, and tokens and passes of each held-out sample. Out: for each arm its τ, the
ratio to `raw`, the recovered share against `none`; intervals from a bootstrap over seeds and samples together, paired
with the arms they are laid against.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

RESAMPLES = 4000
CONTROLS = ("raw", "raw-unscaled", "full", "fp8", "3-taps", "none")
Floats = npt.NDArray[np.float64]


def _tau(lines: Sequence[dict[str, Any]], seeds: Sequence[int], draws: npt.NDArray[np.int64]) -> Floats:
    """τ of each resample: seeds and samples drawn together, [R]."""
    by_seed = {line["seed"]: line for line in lines}
    tokens = np.array([by_seed[s]["tokens"] for s in seeds], dtype=np.float64)
    passes = np.array([by_seed[s]["passes"] for s in seeds], dtype=np.float64)
    seed_draws, sample_draws = draws[:, : len(seeds)], draws[:, len(seeds) :]
    drawn = [np.ix_(a % len(seeds), b % tokens.shape[1]) for a, b in zip(seed_draws, sample_draws, strict=True)]
    return np.array([tokens[part].sum() / passes[part].sum() for part in drawn])


def summarise(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each arm: seeds, bytes_per_token, τ and CE (means), and ratio and share with 95 % intervals."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], []).append(line)
    found: dict[str, Any] = {}
    for arm, own in by_arm.items():
        found[arm] = {
            "seeds": len(own),
            "bytes_per_token": own[0]["bytes_per_token"],
            "tau": round(float(np.mean([x["tau"] for x in own])), 4),
            "ce": round(float(np.mean([x["ce"] for x in own])), 4),
        }
        if "raw" not in by_arm or "none" not in by_arm:
            continue
        seeds = sorted({x["seed"] for x in own} & _seeds(by_arm["raw"]) & _seeds(by_arm["none"]))
        if seeds:
            found[arm] |= _against(own, by_arm["raw"], by_arm["none"], seeds)
    return found


def _seeds(lines: Sequence[dict[str, Any]]) -> set[int]:
    return {x["seed"] for x in lines}


def _against(own: Any, raw: Any, none: Any, seeds: Sequence[int]) -> dict[str, Any]:
    num_samples = len(own[0]["tokens"])
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 2**31, size=(RESAMPLES, len(seeds) + num_samples), dtype=np.int64)
    whole = np.concatenate([np.arange(len(seeds)), np.arange(num_samples)])[None]
    result = {}
    for name, of in (("ratio", lambda a, r, n: a / r), ("share", lambda a, r, n: (a - n) / (r - n))):
        value = of(*(_tau(lines, seeds, whole) for lines in (own, raw, none)))[0]
        drawn = of(*(_tau(lines, seeds, draws) for lines in (own, raw, none)))
        low, high = np.quantile(drawn, [0.025, 0.975])
        result[name] = {"value": round(float(value), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
    return {"paired_seeds": len(seeds), **result}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Recovered share against bytes a token; controls in grey."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for arm, own in summary.items():
        if "share" not in own or arm == "none":
            continue
        share, colour = own["share"], "#888888" if arm in CONTROLS else "#0b6e8a"
        spread = [[max(0.0, share["value"] - share["low"])], [max(0.0, share["high"] - share["value"])]]
        axes.errorbar(own["bytes_per_token"], share["value"], yerr=spread, marker="o", color=colour, capsize=2)
        axes.annotate(
            arm, (own["bytes_per_token"], share["value"]), xytext=(5, 5), textcoords="offset points", fontsize=8
        )
    axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    axes.axhline(0.95, color="#b4552d", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("bytes a token")
    axes.set_ylabel("recovered share of τ")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
