"""Checks of what is served against what was trained.

In: evaluations, captures, the prepared set, and prompts as a server saw them. Out: findings.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from headrace.doctor.evidence import Evidence, Line
from headrace.doctor.finding import Finding
from headrace.evaluate.interval import Interval, PerPrompt, tau_interval

GAP = 0.85  # served τ below this share of the τ seen in training
WORSE = 0.8  # τ of a part below this share of the rest's
FEW = 6  # prompts below which a part is not judged
SCARCE = 0.1  # share of the training samples below which a part is scarce
SAMPLED = 256  # prompts looked at
SEED = 0


def served_below_trained(run: Evidence) -> Finding | None:
    """τ in training, on stored states, far above τ where the target runs."""
    trained = run.taus[-1][2] if run.taus else None
    if trained is None or trained <= 1.0:
        return None
    gained = [one.gained for one in run.served if one.gained]
    if gained:
        found, where = _tau(gained), f"server, {len(gained)} prompts"
    elif run.results:
        low, high = run.results["tau_interval"]
        found, where = Interval(run.results["tau"], low, high), f"eval, {run.results['num_prompts']} prompts"
    else:
        return None
    if found.value <= 1.0 or found.value >= GAP * trained or found.high >= trained:
        return None
    evidence = (
        f"metrics: held-out τ {trained:.3f} at the end of training",
        f"{where}: τ {found.value:.3f} ({found.low:.3f} to {found.high:.3f})",
    )
    step = (
        "compare the states that the server hands out with stored ones of the same tokens: tap numbers, norm, dtype, "
        "quantisation; then template and sampling"
    )
    return Finding("served-below-trained", "fault", "what is served gains far less than training saw", evidence, step)


def falls_with_length(run: Evidence) -> Finding | None:
    """The longest third of the prompts gains far less than the shortest."""
    if run.prepared is None or len(run.prompts) < 3 * FEW:
        return None
    lengths = run.prepared.prompt_tokens
    lines = sorted(run.prompts, key=lambda line: int(lengths[line["row"]]))
    third = len(lines) // 3
    short, long = _of(lines[:third]), _of(lines[-third:])
    edge = int(lengths[lines[-third]["row"]])
    if not _clearly_below(long, short):
        return None
    trained = ~run.prepared.heldout
    share = float((run.prepared.prompt_tokens[trained] >= edge).mean())
    evidence = (
        f"eval: τ {short.value:.3f} on the shortest third of the prompts, {long.value:.3f} on the longest",
        f"prepared: {share:.1%} of the training samples have prompts of {edge} tokens or more",
    )
    if share < SCARCE:
        what = "τ falls with the length of the prompt, and training saw few long ones"
        return Finding("falls-with-length", "lack of data", what, evidence, "add long chats; raise prepare.max_tokens")
    what = "τ falls with the length of the prompt, though training saw many long ones"
    step = "check rotary settings and drafter.sliding_window of the export against the target's"
    return Finding("falls-with-length", "fault", what, evidence, step)


def falls_by_kind(run: Evidence) -> list[Finding]:
    """A source, or a script, whose prompts gain far less than the others."""
    if run.prepared is None:
        return []
    prepared = run.prepared
    sources = prepared.sources()
    rows = np.flatnonzero(~prepared.heldout)
    scripts = {row: script_of(prepared.messages(row)) for row in (*_spread(rows), *(p["row"] for p in run.prompts))}
    found = _weak_parts(run.prompts, lambda row: sources[row], [sources[row] for row in rows], "source")
    return found + _weak_parts(
        run.prompts, lambda row: scripts[row], [scripts[row] for row in _spread(rows)], "language"
    )


def drifted(run: Evidence) -> Finding | None:
    """Captured states that the codec was not fitted on."""
    told = run.captured.get("drift") or {}
    if not told.get("alarm"):
        return None
    count = sum(told["drifted"].values())
    by_source = ", ".join(f"{source} {n}" for source, n in told["drifted"].items())
    evidence = (
        f"capture: {count} of {told['num_records']} records lose more than {told['limit']:.1%} of their energy "
        f"({by_source})",
        f"capture: {told['lost']:.2%} lost on average, {told['fitted']:.2%} where the codec was fitted",
    )
    step = "fit the codec on a slice that has these sources: `headrace capture --raw-slice N`, `headrace codec fit`"
    return Finding("codec-drift", "fault", "states differ from those that the codec was fitted on", evidence, step)


def wrong_template(run: Evidence) -> Finding | None:
    """Prompts end otherwise at the server than in training: another template, or another thinking mode."""
    if run.prepared is None or not run.served:
        return None
    prepared = run.prepared
    prompts = [
        prepared.sample(row).input_ids[: int(prepared.prompt_tokens[row])].tolist()
        for row in _spread(np.flatnonzero(~prepared.heldout))
    ]
    ending, opening = common_tail(prompts), common_tail([p[::-1] for p in prompts])[::-1]
    served = [list(one.prompt_ids) for one in run.served]
    others = [p for p in served if ending and p[-len(ending) :] != ending]
    starts = [p for p in served if opening and p[: len(opening)] != opening]
    if not others and not starts:
        return None
    evidence = [f"prepared: prompts begin with ids {opening[:8]} and end with ids {ending[-8:]}"]
    if others:
        evidence.append(
            f"server: {len(others)} of {len(served)} prompts end otherwise, the first with {others[0][-8:]}"
        )
    if starts:
        evidence.append(
            f"server: {len(starts)} of {len(served)} prompts begin otherwise, the first with {starts[0][:8]}"
        )
    what = "the server renders prompts otherwise than training did: another chat template or thinking mode"
    step = (
        "serve with the template and arguments of prepare.template_args (`headrace show RUN.yaml` prints a training "
        "prompt), or prepare and capture again as you serve"
    )
    return Finding("wrong-template", "fault", what, tuple(evidence), step)


def common_tail(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The ids that all prompts end with; of a single prompt nothing, for it would be all of it."""
    if len(prompts) < 2:
        return []
    backwards = zip(*(reversed(p) for p in prompts), strict=False)
    same = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, backwards)]
    return same[::-1]


def script_of(messages: Iterable[Mapping[str, Any]]) -> str:
    """The script most letters of a chat are written in, as Unicode names it; empty without text."""
    letters = (c for m in messages for c in str(m.get("content", ""))[:2000] if c.isalpha())
    count = Counter(unicodedata.name(c, "UNKNOWN").split()[0] for c in letters)
    return count.most_common(1)[0][0] if count else ""


def _weak_parts(lines: Sequence[Line], kind: Callable[[int], str], trained: Sequence[str], what: str) -> list[Finding]:
    parts: dict[str, list[Line]] = {}
    for line in lines:
        parts.setdefault(kind(line["row"]), []).append(line)
    found = []
    for name, own in sorted(parts.items()):
        rest = [line for other, part in parts.items() if other != name for line in part]
        if not name or len(own) < FEW or len(rest) < FEW or not _clearly_below(_of(own), _of(rest)):
            continue
        share = trained.count(name) / max(len(trained), 1)
        evidence = (
            f"eval: τ {_of(own).value:.3f} on {len(own)} prompts of {name}, {_of(rest).value:.3f} on the others",
            f"prepared: {share:.1%} of the training samples are of {name}",
        )
        scarce = share < SCARCE
        step = f"add chats of {name}" if scarce else f"look at answers of {name}: they may just be hard to foresee"
        said = f"τ is lower for the {what} {name}" + (", of which training saw little" if scarce else "")
        found.append(Finding(f"falls-by-{what}", "lack of data" if scarce else "note", said, evidence, step))
    return found


def _clearly_below(one: Interval, other: Interval) -> bool:
    return one.value < WORSE * other.value and one.high < other.low


def _of(lines: Iterable[Line]) -> Interval:
    return _tau([line["drafter"]["gained"] for line in lines])


def _tau(gained: Sequence[Sequence[int]]) -> Interval:
    return tau_interval(PerPrompt([sum(g) for g in gained], [len(g) for g in gained]), SEED)


def _spread(rows: Any) -> list[int]:
    """At most SAMPLED rows, evenly spaced."""
    return [int(row) for row in rows[:: max(1, math.ceil(len(rows) / SAMPLED))]]
