"""Ids and loss mask of a chat, found from token ids.

In: a chat and a template. Out: one sample, or one for each assistant turn where the template rewrites earlier turns
(thinking stripped from history): each then stands as it was served. The mask covers exactly what the target
generates: the turn's text and its end marker, not what the template writes before or after.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import PrepareError
from headrace.prepare.template import ChatTemplate, Messages

Masked = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


class BoundaryUnclear(PrepareError):
    """It cannot be told from the ids where the target's own tokens begin or end; the chat is left out and counted."""


def masked_samples(template: ChatTemplate, messages: Messages) -> list[Masked]:
    """Ids int32 [T] and mask uint8 [T] of a chat, cut after its last generated token.

    Raises: BoundaryUnclear; PrepareError when the template refuses the chat.
    """
    # Nothing is asked of the target before the first message: an opening assistant turn is context.
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    spans = [_turn(template, messages, i) for i in turns]
    if not spans:
        return []
    whole = spans[-1][0]
    if all(whole[: len(ids)] == ids for ids, _ in spans):
        return [_mask(whole, [(start, len(ids)) for ids, start in spans])]
    return [_mask(ids, [(start, len(ids))]) for ids, start in spans]


def _turn(template: ChatTemplate, messages: Messages, i: int) -> tuple[list[int], int]:
    """Ids up to and with the end marker of assistant turn i, and where its generated tokens start."""
    prompt = template.ids(messages[:i], prompt=True)
    rendered = template.ids(messages[: i + 1], prompt=False)
    if rendered[: len(prompt)] != prompt:
        raise BoundaryUnclear(
            "a prompt that is a prefix of the rendered answer",
            f"a template that renders assistant turn {i} otherwise than it was asked for",
            "match prepare.template_args to how the answers were made",
        )
    end = _end(template, rendered, len(prompt), messages[i])
    return rendered[:end], len(prompt)


def _end(template: ChatTemplate, rendered: list[int], start: int, message: Mapping[str, Any]) -> int:
    """One past the end marker: the last special token of the turn, behind which only white space may stand."""
    marks = template.end_ids()
    places = [p for p in range(start, len(rendered)) if rendered[p] in marks]
    tail = template.tokenizer.decode(rendered[places[-1] + 1 :]) if places else ""
    if not places or tail.strip():
        raise BoundaryUnclear(
            "an end marker after the answer",
            f"none in a rendered answer of {len(rendered) - start} tokens" if not places else f"{tail!r} behind it",
            f"use a template that ends turns with a special token (role {message['role']})",
        )
    return places[-1] + 1


def _mask(ids: list[int], spans: list[tuple[int, int]]) -> Masked:
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in spans:
        mask[start:end] = 1
    return np.array(ids, dtype=np.int32), mask
