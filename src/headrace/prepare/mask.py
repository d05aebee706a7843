"""Ids and loss mask of a chat, found from token ids.

In: a chat and a template. Out: one sample, or one for each assistant turn where the template rewrites earlier turns
(thinking stripped from history): each then stands as it was served. The mask covers exactly what the target
generates: the turn's text and its end marker, not what the template writes before or after. An empty think block that
the message does not hold is the template's: a target served without thinking is given it with the prompt.
"""

import numpy as np
import numpy.typing as npt

from headrace.errors import PrepareError
from headrace.prepare.chats import written
from headrace.prepare.template import THINK, ChatTemplate, Messages

Masked = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


class BoundaryUnclear(PrepareError):
    """It cannot be told from the ids where the target's own tokens begin or end; the chat is left out and counted."""


def masked_samples(template: ChatTemplate, messages: Messages) -> list[Masked]:
    """Ids int32 [T] and mask uint8 [T] of a chat, cut after its last generated token; none without an answer.

    Raises: BoundaryUnclear; TemplateRefused when the template raises for the chat.
    """
    # Nothing is asked of the target before the first message: an opening assistant turn is context. So is an empty one.
    turns = [i for i, m in enumerate(messages) if i and m["role"] == "assistant" and written(m)]
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
    end = _end(template, rendered, len(prompt), written(messages[i]))
    return rendered[:end], _start(template, rendered[:end], len(prompt), written(messages[i]))


def _start(template: ChatTemplate, ids: list[int], start: int, text: str) -> int:
    """The first token the target writes: behind an empty think block, if the template put one there."""
    opens, closes = template.think_ids
    if closes is None or THINK[1] in text or closes not in ids[start:]:
        return start
    place = ids.index(closes, start)
    if template.tokenizer.decode([i for i in ids[start:place] if i != opens]).strip():
        return start
    place += 1
    while place < len(ids) and not template.tokenizer.decode([ids[place]]).strip():
        place += 1
    return place


def _end(template: ChatTemplate, rendered: list[int], start: int, text: str) -> int:
    """One past the end marker: the first special token behind the text, where only such and white space may follow."""
    marks = {i for i, token in template.end_tokens.items() if token not in THINK and token not in text}
    end, place = 0, len(rendered)
    while place > start and (
        rendered[place - 1] in marks or not template.tokenizer.decode([rendered[place - 1]]).strip()
    ):
        place -= 1
        end = place + 1 if rendered[place] in marks else end
    if not end:
        raise BoundaryUnclear(
            "an end marker after the answer",
            f"none in a rendered answer of {len(rendered) - start} tokens",
            "use a template that ends turns with a special token",
        )
    return end


def _mask(ids: list[int], spans: list[tuple[int, int]]) -> Masked:
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in spans:
        mask[start:end] = 1
    return np.array(ids, dtype=np.int32), mask
