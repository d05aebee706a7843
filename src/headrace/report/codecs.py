"""Codecs side by side, as one picture.

In: rows of `headrace codec report`. Out: an SVG: energy lost against bytes a token, and what each loses tap by tap.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headrace.files import write_atomic
from headrace.report.plots import GREY, INK, svg

LEAST = 1e-6  # what lossless codecs are drawn at, on a logarithmic axis


def draw_codecs(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture. Args: rows: `codec`, `bytes_per_token`, `lost`, `lost_by_tap` of each codec."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    bytes_axes, taps_axes = figure.subplots(1, 2)
    for row in rows:
        lost = max(row["lost"], LEAST)
        (points,) = bytes_axes.plot(row["bytes_per_token"], lost, marker="o", linestyle="")
        name = Path(row["codec"]).name
        bytes_axes.annotate(
            name,
            (row["bytes_per_token"], lost),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
        taps = [max(share, LEAST) for share in row["lost_by_tap"]]
        taps_axes.plot(range(1, len(taps) + 1), taps, marker=".", color=points.get_color(), label=name)
    for axes in (bytes_axes, taps_axes):
        axes.set_yscale("log")
        axes.grid(color=GREY, alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    bytes_axes.set_xscale("log")
    bytes_axes.margins(x=0.2)
    bytes_axes.set_xlabel("bytes a token")
    bytes_axes.set_ylabel("share of energy lost")
    taps_axes.set_xlabel("tap, first to last")
    taps_axes.set_xticks(range(1, 1 + max((len(row["lost_by_tap"]) for row in rows), default=0)))
    if rows:
        taps_axes.legend(frameon=False, fontsize=8)
    write_atomic(path, svg(figure).encode())
