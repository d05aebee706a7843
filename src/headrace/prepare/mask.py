"""Ids and loss mask of a chat, found from token ids.

In: a chat and a template. Out: one sample, or one for each assistant turn where the template rewrites earlier turns
(thinking stripped from history): each then stands as it was served. The mask covers exactly what the target
generates: the turn's text and its end marker, not what the template writes before or after. An empty think block that
the message does not hold is the template's: a target served without thinking is given it with the prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import PrepareError
from headrace.prepare.chats import written
from headrace.prepare.kept import check_kept, thought_of
from headrace.prepare.template import THINK, ChatTemplate, Messages, TemplateRefused

Masked = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
Turn = tuple[list[int], list[bool]]


class BoundaryUnclear(PrepareError):
    """It cannot be told from the ids where the target's own tokens begin or end; the chat is left out and counted."""


@dataclass(frozen=True)
class Trained:
    """Which of an assistant's tokens are trained."""

    last_turn_only: bool = False
    tool_arguments: bool = True


def masked_samples(
    template: ChatTemplate, messages: Messages, tools: Messages = (), what: Trained | None = None
) -> list[Masked]:
    """Ids int32 [T] and mask uint8 [T] of a chat, cut after its last generated token; none without an answer.

    Raises: BoundaryUnclear; TemplateRefused when the template raises for the chat; NotKept when the template leaves out
    what the chat holds.
    """
    what = what or Trained()
    messages = template.served(messages)
    check_kept(template, messages, tools)
    turns = answered_turns(messages)
    chosen = [_turn(template, messages, i, tools, what) for i in (turns[-1:] if what.last_turn_only else turns)]
    made = [turn for turn in chosen if turn is not None]
    if not made:
        return []
    whole = made[-1][0]
    if all(whole[: len(ids)] == ids for ids, _ in made):
        mask = np.zeros(len(whole), dtype=np.uint8)
        for _, marks in made:
            mask[: len(marks)] |= np.array(marks, dtype=np.uint8)
        return [(np.array(whole, dtype=np.int32), mask)]
    return [(np.array(ids, dtype=np.int32), np.array(marks, dtype=np.uint8)) for ids, marks in made]


def answered_turns(messages: Messages) -> list[int]:
    """Assistant turns that are trained.

    Nothing is asked of the target before the first message: an opening assistant turn is context. So is an empty one,
    and one that the data marks with `loss: false` or `weight: 0`.
    """
    return [
        i
        for i, m in enumerate(messages)
        if i and m["role"] == "assistant" and written(m) and m.get("loss") is not False and m.get("weight") != 0
    ]


def _turn(template: ChatTemplate, messages: Messages, i: int, tools: Messages, what: Trained) -> Turn | None:
    """Ids up to and with the end marker of assistant turn i, and which of them are trained.

    None for a turn that answers nobody, where the template cannot ask for one.
    """
    try:
        prompt = template.ids(messages[:i], prompt=True, tools=tools)
    except TemplateRefused:
        later = any(m["role"] == "user" for m in messages[i:])
        if later and not any(m["role"] == "user" for m in messages[:i]):
            return None
        raise
    rendered = template.ids(messages[: i + 1], prompt=False, tools=tools)
    text = written(messages[i])
    if rendered[: len(prompt)] != prompt:
        rendered = _continued(template, messages, i, tools, prompt)
    ids = _ended(template, messages, i, tools, rendered, len(prompt), text)
    start = _start(template, ids, len(prompt), text)
    trained = [start <= place for place in range(len(ids))]
    marks = template.marked(messages[: i + 1], tools)
    if marks is not None:
        _keep_marked(trained, marks, i)
    if not what.tool_arguments and messages[i].get("tool_calls"):
        _leave_out_arguments(template, messages, i, tools, ids, trained)
    return ids, trained


def _continued(template: ChatTemplate, messages: Messages, i: int, tools: Messages, prompt: list[int]) -> list[int]:
    """Ids of the prompt and of what follows, where the whole conversation's ids do not begin with the prompt's.

    Either two texts join in one token, as two newlines do; or the prompt opens a think block that the template closes
    and drops from the answer: then the answer is put together as the target wrote it.
    """
    asked = template.rendered(messages[:i], prompt=True, tools=tools)
    whole = template.rendered(messages[: i + 1], prompt=False, tools=tools)
    if whole.startswith(asked):
        return prompt + template.encode(whole[len(asked) :])
    opened = asked.rstrip().removesuffix(THINK[0])
    thought, answer = thought_of(messages[i])
    if opened != asked.rstrip() and thought.strip() and whole.startswith(opened):
        said, found, tail = whole[len(opened) :].partition(answer.strip())
        if found and not said.strip():
            inside = THINK[1] in str(messages[i]["content"])  # then the target's own white space is known
            closed = THINK[1] + answer[: len(answer) - len(answer.lstrip())] if inside else "\n" + THINK[1] + "\n\n"
            return prompt + template.encode(thought.lstrip() + closed + answer.strip() + tail)
    raise BoundaryUnclear(
        "a prompt that is a prefix of the rendered answer",
        f"a template that renders assistant turn {i} otherwise than it was asked for",
        "match prepare.template_args to how the answers were made",
    )


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


def _ended(
    template: ChatTemplate, messages: Messages, i: int, tools: Messages, ids: list[int], start: int, text: str
) -> list[int]:
    """The ids up to and with the end marker: one behind the text, or what opens the next turn, if the target stops at
    that."""
    end = _end(template, ids, start, text)
    if end:
        return ids[:end]
    role = "tool" if i + 1 < len(messages) and messages[i + 1]["role"] == "tool" else "user"
    longer = template.ids([*messages[: i + 1], {"role": role, "content": "?"}], prompt=False, tools=tools)
    opening = next((token for token in reversed(longer) if token in template.stops), None)
    if opening is not None:
        return [*ids, opening]
    raise BoundaryUnclear(
        "an end marker after the answer",
        f"none in a rendered answer of {len(ids) - start} tokens",
        "use a template that ends turns with a special token, or list what ends them as eos_token_id in the "
        "model's generation_config.json",
    )


def _end(template: ChatTemplate, rendered: list[int], start: int, text: str) -> int:
    """One past the end marker: the first special token behind the text, where only such and white space may follow;
    0 without one."""
    marks = {i for i, token in template.end_tokens.items() if token not in THINK and token not in text}
    end, place = 0, len(rendered)
    while place > start and (
        rendered[place - 1] in marks or not template.tokenizer.decode([rendered[place - 1]]).strip()
    ):
        place -= 1
        end = place + 1 if rendered[place] in marks else end
    return end


def _keep_marked(trained: list[bool], marks: list[bool], i: int) -> None:
    """What the template's `generation` blocks leave out of a turn is not trained; they add nothing to it."""
    for place in range(len(trained)):
        trained[place] &= place < len(marks) and marks[place]
    if not any(trained):
        raise BoundaryUnclear(
            "a `generation` block around each assistant turn",
            f"none that holds what the target writes in turn {i}",
            "mend the template's blocks, or remove them all: masks are found without",
        )


def _leave_out_arguments(
    template: ChatTemplate, messages: Messages, i: int, tools: Messages, ids: list[int], trained: list[bool]
) -> None:
    """Arguments are what changes in the text when a call is rendered without them."""
    whole = template.rendered(messages[: i + 1], prompt=False, tools=tools)
    encoded = template.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    shared = list(encoded["input_ids"])[: len(ids)]
    if shared != ids[: len(shared)]:
        raise BoundaryUnclear(
            "a turn whose ids are those of its rendered text", f"others in turn {i}", "set train_tool_arguments"
        )
    for number in range(len(messages[i]["tool_calls"])):
        bare = [*messages[:i], _without_arguments(messages[i], number)]
        other = template.rendered(bare, prompt=False, tools=tools)
        first = _shared(whole, other)
        last = len(whole) - _shared(whole[first:][::-1], other[first:][::-1])
        for place, (begins, ends) in enumerate(encoded["offset_mapping"][: len(ids)]):
            if begins < last and ends > first:
                trained[place] = False


def _without_arguments(message: Any, number: int) -> dict[str, Any]:
    calls = [dict(call) for call in message["tool_calls"]]
    function = calls[number]["function"]
    empty: Any = "{}" if isinstance(function.get("arguments"), str) else {}
    calls[number]["function"] = {**function, "arguments": empty}
    return {**message, "tool_calls": calls}


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
