"""Shares of a prepared set, by role and by source.

In: a prepared set and the tokenizer it was made with. Out: tokens and trained tokens of each source, counted, and of
each role, from rows spread over the set: the texts of a row's messages are found again in its tokens. Trained tokens
of another role than the assistant's are what this is for: there must be none.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from headrace.prepare.chats import TEXT_FIELDS
from headrace.prepare.model_files import load_tokenizer
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample

MOST_ROWS = 2000
TEMPLATE = "template"
UNASSIGNED = "unassigned"
Counts = dict[str, dict[str, int]]


def shares(folder: Path, model: Path | str) -> dict[str, Any]:
    """Count a prepared set.

    Returns: `sources` and `roles`, each name with samples (of sources: held_out too), tokens, trained;
        `rows_for_roles`, the rows that roles were counted in; `num_samples`.
    Raises: PrepareError without a prepared set, TargetError without a tokenizer.
    """
    prepared = PreparedSet.open(folder)
    number = min(prepared.num_samples, MOST_ROWS)
    rows = np.unique(np.linspace(0, max(0, prepared.num_samples - 1), number).round().astype(int))
    tokenizer = load_tokenizer(model)
    roles: Counts = defaultdict(lambda: {"samples": 0, "tokens": 0, "trained": 0})
    for row in rows:
        sample = prepared.sample(int(row))
        named = roles_of(sample, prepared.messages(int(row)), tokenizer)
        for role in sorted(set(named)):
            own = np.array([name == role for name in named])
            roles[role]["samples"] += 1
            roles[role]["tokens"] += int(own.sum())
            roles[role]["trained"] += int(sample.loss_mask[own].sum())
    return {
        "num_samples": prepared.num_samples,
        "rows_for_roles": len(rows),
        "sources": _sources(prepared),
        "roles": dict(sorted(roles.items())),
    }


def _sources(prepared: PreparedSet) -> Counts:
    found: Counts = {}
    names = np.array(prepared.sources(), dtype=object)
    for name in sorted(set(names.tolist())):
        own = names == name
        found[name] = {
            "samples": int(own.sum()),
            "held_out": int(prepared.heldout[own].sum()),
            "tokens": int(prepared.lengths[own].sum()),
            "trained": int(prepared.trained_tokens[own].sum()),
        }
    return found


def roles_of(sample: Sample, messages: list[dict[str, Any]], tokenizer: Any) -> list[str]:
    """The role that wrote each token; `template` for the others, `unassigned` where text and tokens do not match.

    A trained token that stands in no other role's text is the assistant's: its end marker, its calls of tools.
    """
    text = tokenizer.decode(sample.input_ids)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != sample.input_ids.tolist():
        return [UNASSIGNED] * sample.num_tokens
    written = _by_character(text, messages)
    named = []
    for (begins, ends), trained in zip(encoded["offset_mapping"], sample.loss_mask, strict=True):
        own = next((role for role in written[begins:ends] if role), "assistant" if trained else TEMPLATE)
        named.append(own)
    return named


def _by_character(text: str, messages: list[dict[str, Any]]) -> list[str]:
    """The role of each character; empty where no message has it. Messages stand in their order."""
    written, place = [""] * len(text), 0
    for message in messages:
        for name in (*TEXT_FIELDS[1:], TEXT_FIELDS[0]):  # thinking stands before the content
            said = message.get(name)
            part = said.strip() if isinstance(said, str) else ""
            found = text.find(part, place) if part else -1
            if found >= 0:
                place = found + len(part)
                written[found:place] = [str(message["role"])] * len(part)
    return written


def table(found: dict[str, Any]) -> list[Table]:
    """The shares as two tables for the eye."""
    made = []
    for title, key in (("by source", "sources"), (f"by role, from {found['rows_for_roles']} rows", "roles")):
        shown = Table(title=title, title_justify="left")
        total = sum(counts["tokens"] for counts in found[key].values()) or 1
        shown.add_column(key.removesuffix("s"))
        for column in ("samples", "tokens", "share", "trained", "of its tokens"):
            shown.add_column(column, justify="right")
        for name, counts in found[key].items():
            tokens, trained = counts["tokens"], counts["trained"]
            shares_ = f"{tokens / total:.1%}", f"{trained:,}", f"{trained / max(tokens, 1):.1%}"
            shown.add_row(name, f"{counts['samples']:,}", f"{tokens:,}", *shares_)
        made.append(shown)
    return made
