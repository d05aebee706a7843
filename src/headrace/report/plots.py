"""Plots of a report as SVG text, to be set into a page.

In: a few lists of numbers. Out: SVG that needs no file beside it.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

INK, ACCENT, GREY = "#1d2a33", "#0b6e8a", "#9aa7ae"


def bars(labels: Sequence[str], values: Sequence[float], intervals: Sequence[tuple[float, float] | None]) -> str:
    """Horizontal bars with their values and, where given, 95 % intervals; the first is the one that matters."""
    figure = _figure(7.2, 0.5 + 0.42 * len(labels))
    axes = figure.add_subplot()
    places = range(len(labels))
    axes.barh(list(places), list(values), color=[ACCENT] + [GREY] * (len(values) - 1), height=0.62)
    for place, value, interval in zip(places, values, intervals, strict=True):
        right = value
        if interval is not None:
            axes.plot(interval, [place, place], color=INK, linewidth=1.4)
            right = max(value, interval[1])
        axes.text(right + 0.02 * max(values), place, f"{value:.2f}", va="center", color=INK)
    axes.set_yticks(list(places), list(labels))
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.15)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    return svg(figure)


def curve(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    floor: float | None = None,
) -> str:
    """Lines (name, x, y), the first in colour, with an optional dotted level."""
    figure = _figure(7.2, 2.8)
    axes = figure.add_subplot()
    for number, (name, xs, ys) in enumerate(lines):
        axes.plot(
            xs, ys, color=ACCENT if number == 0 else GREY, linewidth=1.8, marker="." if len(xs) < 60 else "", label=name
        )
    if floor is not None:
        axes.axhline(floor, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(lines) > 1:
        axes.legend(frameon=False)
    return svg(figure)


def columns(values: Sequence[float], x_label: str, y_label: str) -> str:
    """Columns numbered from 1."""
    figure = _figure(7.2, 2.4)
    axes = figure.add_subplot()
    places = list(range(1, len(values) + 1))
    axes.bar(places, list(values), color=ACCENT, width=0.62)
    for place, value in zip(places, values, strict=True):
        axes.text(place, value + 0.01, f"{value:.0%}", ha="center", color=INK, fontsize=8)
    axes.set_xticks(places)
    axes.set_ylim(0, max([*values, 0.05]) * 1.15)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return svg(figure)


def cost(points: Sequence[Mapping[str, Any]]) -> str:
    """Cost against disk budget, a line a codec, from the points of a saved plan; hours where no price is known."""
    priced = all(point["usd"] is not None for point in points)
    scale, unit = _scale(max(point["disk_bytes"] for point in points))
    figure = _figure(7.2, 3.2)
    axes = figure.add_subplot()
    for codec in dict.fromkeys(point["codec"] for point in points):
        line = [point for point in points if point["codec"] == codec]
        heights = [point["usd"] if priced else point["hours"] for point in line]
        axes.plot([point["disk_bytes"] / scale for point in line], heights, linewidth=1.6, label=codec)
    axes.set_xlabel(f"disk budget, {unit}")
    axes.set_ylabel("US dollars" if priced else "hours")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return svg(figure)


def _scale(num_bytes: float) -> tuple[float, str]:
    return next(((s, u) for s, u in ((1e12, "TB"), (1e9, "GB")) if num_bytes >= s), (1e6, "MB"))


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure) -> str:
    """A figure as SVG text, without what stands before it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]
