"""A plan for people, for programs and for the report's page.

In: a `Plan`. Out: tables for a terminal, a dictionary of JSON values, and the points of cost against disk budget.
Stable keys of the JSON: `bytes_per_token`, `total_bytes`, `options`.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.errors import PlanError
from headrace.files import write_json
from headrace.plan.options import Option
from headrace.plan.plan import Plan, make_plan
from headrace.plan.quantity import HOUR_S, Figure, bytes_text, money_text, rate_text, time_text

TITLES = {
    "bytes_per_token": "bytes per token",
    "bytes_per_sample": "bytes per sample",
    "total_bytes": "states in all",
    "stored_bytes": "store in all (ids, index, framing)",
    "link_bytes_s_per_1000_tokens_s": "link for 1,000 tokens/s",
    "link_tokens_s": "tokens the link carries",
    "capture_tokens_s": "prefill (capturing given answers)",
    "capture_s": "one capture pass",
    "decode_tokens_s": "decoding (regenerating answers)",
    "decode_s": "regenerating all answers",
    "train_tokens": "tokens trained on, all epochs",
    "train_tokens_s": "training",
    "train_link_bytes_s": "link that training asks for",
    "train_s": "training, all epochs",
    "target_bytes": "target's weights",
    "drafter_params": "drafter",
    "trainer_gpu_bytes": "memory of one training GPU",
    "trainer_ram_bytes": "trainer's host memory, read ahead",
    "move_bytes": "to move if only tokens and drafter move",
}


def to_json(plan: Plan) -> dict[str, Any]:
    """JSON values of a plan; times in seconds, sizes in bytes, infinities and unknowns as null."""
    return {
        "bytes_per_token": _plain(plan.codec.value),
        "bytes_per_sample": _plain(plan.figures["bytes_per_sample"].value),
        "total_bytes": _plain(plan.figures["total_bytes"].value),
        "stored_bytes": _plain(plan.figures["stored_bytes"].value),
        "target": {
            "name": plan.target.name,
            "hidden_size": plan.target.hidden_size,
            "num_blocks": plan.target.num_blocks,
            "params": plan.target.params,
            "active_params": plan.target.active_params,
        },
        "taps": [str(tap) for tap in plan.taps],
        "codec": plan.codec.name,
        "num_samples": plan.tokens.num_samples,
        "num_tokens": _plain(plan.tokens.num_tokens),
        "tokens_from": plan.tokens.origin,
        "options": [_option(o) for o in plan.of_codec(plan.codec.name)],
        "codecs": [_codec(plan, name) for name in plan.sizes],
        "figures": {name: _figure(figure) for name, figure in plan.figures.items()},
        "break_even": plan.break_even.text(),
        "recommendation": _recommendation(plan),
        "notes": list(plan.notes),
    }


def save_plan(plan: Plan, path: Path) -> None:
    """Save a plan: the inputs that make it again, its figures for `--check`, its cost by disk for a run's report.

    Raises: PlanError where it cannot be written.
    """
    if path.is_dir():
        raise PlanError("a file to save the plan in", f"the folder {path}", f"for example --save {path / 'plan.json'}")
    points = [asdict(point) for point in cost_against_disk(plan)]
    inputs = plan.inputs.model_dump(mode="json")
    value = {"inputs": inputs, "made_for": made_for(plan), "plan": to_json(plan), "cost_against_disk": points}
    try:
        write_json(path, value)
    except OSError as exc:
        raise PlanError(f"a plan that can be written to {path}", str(exc), "name another file with --save") from exc


def made_for(plan: Plan) -> str:
    """Whose rates a plan rests on: the machine that was measured, or modelled GPUs."""
    measured, site = plan.inputs.measured, plan.sites[0]
    if measured is not None:
        return f"{measured.machine}, measured {measured.date}"
    return f"{site.capture} (capture) and {site.train} (training), modelled"


def _recommendation(plan: Plan) -> dict[str, Any]:
    chosen = plan.recommendation
    return {
        "best": None if chosen.best is None else _option(chosen.best),
        "this_version": None if chosen.now is None else _option(chosen.now),
        "reasons": list(chosen.reasons),
        "remedies": list(chosen.remedies),
        "run_file": chosen.run_file,
    }


def _codec(plan: Plan, name: str) -> dict[str, Any]:
    codec = next(c for c in plan.codecs if c.name == name)
    size = plan.sizes[name]
    return {
        "name": name,
        "bytes_per_token": _plain(codec.value),
        "stored_bytes": _plain(size.value),
        "ratio": plan.codecs[0].value / codec.value if codec.value else None,
        "evidence": codec.evidence,
        "options": [_option(o) for o in plan.of_codec(name)],
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "way": option.way,
        "codec": option.codec,
        "placement": option.placement,
        "feasible": option.feasible,
        "blocked": list(option.blocked),
        "kept_bytes": _plain(option.kept_bytes),
        "capture_passes": option.capture_passes,
        "saved_share": option.saved_share,
        "first_epoch_s": _plain(option.times.first_s),
        "later_epoch_s": _plain(option.times.later_s),
        "wall_s": _plain(option.times.wall_s),
        "usd": None if option.usd is None else _plain(option.usd),
        "limited_by": option.limited_by,
        "formula": option.times.formula,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": _plain(figure.value), "unit": figure.unit, "formula": figure.formula, "modelled": figure.modelled}


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def figure_text(figure: Figure) -> str:
    """A figure in the units people read."""
    if figure.unit == "B":
        return bytes_text(figure.value)
    if figure.unit == "B/s":
        return rate_text(figure.value)
    if figure.unit == "s":
        return time_text(figure.value)
    return f"{figure.value:,.0f} {figure.unit}"


def render(plan: Plan, explain: bool = False) -> RenderableType:
    """Tables and sentences for a terminal; with `explain`, every formula."""
    parts: list[RenderableType] = [_head(plan), _figures(plan, explain), _codecs(plan), _options(plan)]
    parts.append(Text(f"break-even: {plan.break_even.text()}"))
    parts.append(_advice(plan))
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    if any(f.modelled for f in plan.figures.values()):
        parts.append(Text("~ modelled, not measured; `headrace plan --measure` replaces it", style="dim"))
    if explain:
        parts.append(_sources(plan))
    return Group(*parts)


def _head(plan: Plan) -> Text:
    target, tokens = plan.target, plan.tokens
    kinds = ", ".join(f"{count} {kind}" for kind, count in target.kinds().items())
    return Text(
        f"{target.name}: {target.num_blocks} blocks ({kinds or 'not known'}) of {target.hidden_size},"
        f" {target.params / 1e9:.2f} G parameters, {target.active_params / 1e9:.2f} G at work\n"
        f"{tokens.num_samples:,} samples, {tokens.num_tokens:,.0f} tokens ({tokens.origin})"
    )


def _figures(plan: Plan, explain: bool) -> Table:
    table = Table("figure", "value", *(["formula"] if explain else []), title=f"with {plan.codec.name}")
    for name, figure in plan.figures.items():
        value = ("~ " if figure.modelled else "") + figure_text(figure)
        table.add_row(TITLES[name], value, *([figure.formula] if explain else []))
    return table


def _codecs(plan: Plan) -> Table:
    table = Table("codec", "B/token", "less", "store in all", "known of its loss", title="codecs")
    raw = max(c.value for c in plan.codecs)
    for codec in plan.codecs:
        name = codec.name
        size = bytes_text(plan.sizes[codec.name].value)
        table.add_row(name, f"{codec.value:,.0f}", f"{raw / codec.value:.1f}x", size, codec.evidence)
    return table


def _options(plan: Plan) -> Table:
    table = Table(
        "way",
        "captured",
        "epochs: first, later",
        "in all",
        "cost",
        "limited by",
        title=f"options with {plan.codec.name}",
    )
    for option in plan.of_codec(plan.codec.name):
        if option.feasible:
            times = f"{time_text(option.times.first_s)}, {time_text(option.times.later_s)}"
            row = (times, time_text(option.times.wall_s), money_text(option.usd), option.limited_by)
        else:
            row = ("-", "-", "-", "; ".join(option.blocked))
        table.add_row(option.way, option.placement, *row)
    return table


def _advice(plan: Plan) -> Text:
    chosen = plan.recommendation
    head = "recommended" if chosen.best is not None else "nothing is possible as planned"
    lines = [head, *(f"  {r}" for r in chosen.reasons), *(f"  instead: {r}" for r in chosen.remedies)]
    return Text("\n".join([*lines, "run file:", *(f"  {line}" for line in chosen.run_file.splitlines())]))


def _sources(plan: Plan) -> Text:
    catalogue = plan.catalogue
    cited = [f"train_share: {catalogue.cite(catalogue.assumptions.train_share)}"]
    for site in plan.sites:
        for devices in {str(site.capture): site.capture, str(site.train): site.train}.values():
            if devices.gpu is not None:
                cited.append(f"{devices.name} prefill_share: {catalogue.cite(devices.gpu.prefill_share)}")
                if devices.gpu.usd_per_hour is not None:
                    cited.append(f"{devices.name} usd_per_hour: {catalogue.cite(devices.gpu.usd_per_hour)}")
    return Text("sources\n" + "\n".join(f"  {line}" for line in dict.fromkeys(cited)), style="dim")


@dataclass(frozen=True)
class CostPoint:
    """What the cheapest feasible option of a codec costs under one disk budget."""

    codec: str
    disk_bytes: float
    way: str
    hours: float
    usd: float | None


def cost_against_disk(plan: Plan, num_points: int = 25) -> tuple[CostPoint, ...]:
    """Cost of each codec's cheapest option over disk budgets from nothing to what raw states need."""
    most = 1.1 * max(size.value for size in plan.sizes.values())
    budgets = [most * i / (num_points - 1) for i in range(num_points)]
    points = []
    for budget in budgets:
        at = make_plan(plan.inputs.model_copy(update={"disk_budget": budget}))
        for codec in at.codecs:
            feasible = [o for o in at.of_codec(codec.name) if o.feasible]
            if feasible:
                best = min(feasible, key=_cost)
                points.append(CostPoint(codec.name, budget, best.way, best.times.wall_s / HOUR_S, best.usd))
    return tuple(points)


def _cost(option: Option) -> tuple[float, float]:
    return (math.inf if option.usd is None else option.usd, option.times.wall_s)
