"""One self-contained HTML page a run.

In: a run's folder and its resolved settings. Out: `report.html` (no script, no network, no file beside it) and the
figures of `results.json`.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.config import Resolved, RunFolder, leaves
from headrace.files import read_json_lines, write_atomic
from headrace.plan.measure import LABELS, check_saved
from headrace.plan.run_file import PLAN, load_saved_plan, real_figures
from headrace.report import plots
from headrace.report.results import gather

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2a33; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.lead { font-size: 1.25rem; } .muted { color: #5d6b73; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
border-bottom: 1px solid #dde3e6; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
details { margin-top: 1rem; } code { background: #eef2f4; padding: 0 .25rem; }
"""

_IDENTITY = {
    True: "every answer is the target's own greedy answer",
    False: "<strong>some answers differ from the target's own: do not serve this drafter</strong>",
    None: "answers were sampled, so they are not compared one by one",
}


def write_report(folder: RunFolder, resolved: Resolved) -> dict[str, Any]:
    """Write `report.html` for a captured, trained and evaluated run.

    Returns: the figures of `results.json`.
    Raises: HeadraceError naming the stage that is missing.
    """
    results = gather(folder, streamed=resolved.run.source is not None)
    parts = [
        _lead(results),
        _floors(results),
        _learning(folder),
        _slots(results),
        _tasks(results),
        _sizes(results),
        _times(results),
        _planned(folder),
        _settings(resolved),
    ]
    title = f"headrace: {html.escape(folder.root.name)}"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )
    write_atomic(folder.root / "report.html", page)
    return results


def _lead(results: dict[str, Any]) -> str:
    low, high = results["tau_interval"]
    same = _IDENTITY[results["greedy_identical"]]
    return (
        f'<p class="lead">The drafter gains <strong>{results["tau"]:.2f} tokens per target pass</strong> '
        f"(95 % interval {low:.2f} to {high:.2f}) on {results['num_prompts']} held-out prompts; {same}.</p>"
        f'<p class="muted">Plain decoding gains 1. τ = generated tokens, the prefill token left out, per target pass. '
        f"A divergence counts as a tie where the target's own two best logits lie within the tie gap: "
        f"{results['num_ties']} here.</p>"
    )


def _floors(results: dict[str, Any]) -> str:
    rows = [("trained drafter", "tau"), ("no target features", "tau_no_features")]
    rows += [("prompt lookup", "tau_prompt_lookup"), ("untrained drafter", "tau_untrained")]
    rows = [(name, key) for name, key in rows if results[key] is not None]
    low, high = results["tau_interval"]
    intervals: list[tuple[float, float] | None] = [(low, high)] + [None] * (len(rows) - 1)
    plot = plots.bars([name for name, _ in rows], [results[key] for _, key in rows], intervals)
    margins = [
        f"<li>over {name}: {margin['value']:+.2f} (95 % interval {margin['low']:+.2f} to {margin['high']:+.2f})</li>"
        for name, key in (("no target features", "margin_no_features"), ("prompt lookup", "margin_prompt_lookup"))
        if (margin := results[key]) is not None
    ]
    return f"<h2>τ beside its floors</h2>{plot}<ul>{''.join(margins)}</ul>"


def _learning(folder: RunFolder) -> str:
    lines = []
    losses = []
    for name, features in (("drafter", True), ("no target features", False)):
        metrics = read_json_lines(folder.train(features) / "metrics.jsonl")
        evaluated = [m for m in metrics if m.get("tau") is not None]
        if evaluated:
            lines.append((name, [m["step"] for m in evaluated], [m["tau"] for m in evaluated]))
        measured = [m for m in metrics if m.get("loss") is not None]
        if measured:
            losses.append((name, [m["step"] for m in measured], [m["loss"] for m in measured]))
    if not lines:
        return ""
    plot = plots.curve(lines, "step", "held-out τ")
    loss = plots.curve(losses, "step", "loss") if losses else ""
    return f"<h2>Learning curve</h2>{plot}{loss}"


def _slots(results: dict[str, Any]) -> str:
    if not results["per_slot"]:
        return ""
    plot = plots.columns(results["per_slot"], "slot of the block (the anchor is slot 0)", "accepted")
    return f"<h2>Acceptance by slot</h2>{plot}"


def _tasks(results: dict[str, Any]) -> str:
    rows = [(name, task["num_prompts"], f"{task['tau']:.2f}") for name, task in sorted(results["per_task"].items())]
    return "<h2>By task</h2>" + _table(("task", "prompts", "τ"), rows)


def _sizes(results: dict[str, Any]) -> str:
    raw, stored, tokens = results["bytes_raw"], results["bytes_stored"], results["num_tokens"]
    rows = [("states", "streamed: their sizes are known where they were captured")]
    if tokens is not None:
        rows = [
            ("tokens with states", f"{tokens:,}"),
            ("raw states", f"{raw / 1e6:,.1f} MB ({raw / 2**20:,.1f} MiB)"),
            ("stored", f"{stored / 1e6:,.1f} MB ({stored / 2**20:,.1f} MiB)"),
            ("ratio", f"{raw / stored:.2f}x"),
            ("stored per token", f"{stored / tokens:,.0f} bytes"),
        ]
    if (own := results["draft_vocabulary"]) is not None:
        rows += [
            ("draft vocabulary", f"{own['size']:,} of {own['target_size']:,} ids"),
            ("trained tokens inside it", f"{own['inside']:.2%} (held-out: {own['inside_heldout']:.2%})"),
            ("trained tokens outside, without loss", f"{own['num_outside']:,}"),
        ]
    return "<h2>Sizes</h2>" + _table(("", ""), rows)


def _times(results: dict[str, Any]) -> str:
    rows = [(name, f"{seconds:,.1f} s") for name, seconds in results["seconds"].items()]
    rows.append(("all stages", f"{results['wall_seconds']:,.1f} s"))
    plain, speculative = results["seconds_plain"], results["seconds_speculative"]
    rows.append(("plain decoding of the held-out prompts", f"{plain:,.1f} s"))
    rows.append(("speculative decoding of the same", f"{speculative:,.1f} s ({plain / speculative:.2f}x)"))
    return "<h2>Times</h2>" + _table(("", ""), rows)


def _planned(folder: RunFolder) -> str:
    """Planned beside real, and what other disk budgets would have cost; nothing where the run was not planned."""
    if not (folder.root / PLAN).is_file():
        return ""
    saved = load_saved_plan(folder.root)
    rows = [
        (LABELS[row.name], row.show(row.planned), row.show(row.real), row.difference)
        for row in check_saved(saved, real_figures(folder))
    ]
    points = saved["cost_against_disk"]
    plot = f"<p>Cheapest way at each disk budget, planned:</p>{plots.cost(points)}" if points else ""
    head = f'<h2>Planned and real</h2><p class="muted">Planned for {html.escape(saved["made_for"])}.</p>'
    return f"{head}{_table(('', 'planned', 'real', 'real to planned'), rows)}{plot}"


def _settings(resolved: Resolved) -> str:
    rows = [(path, str(value), resolved.origins[path]) for path, value in leaves(resolved.run.model_dump(mode="json"))]
    return f"<details><summary>Settings</summary>{_table(('setting', 'value', 'from'), rows)}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        marked = [
            f"<{tag}{' class=' + chr(34) + 'n' + chr(34) if i else ''}>{html.escape(str(c))}</{tag}>"
            for i, c in enumerate(cells)
        ]
        return f"<tr>{''.join(marked)}</tr>"

    top = line("th", head) if any(head) else ""
    return f"<table>{top}{''.join(line('td', row) for row in rows)}</table>"
