"""Layouts of chat data, brought to one form.

In: a row of a source, and which layout it has, or that this is to be found out. Out: messages with role, content and,
where they are given, thinking and tool calls; the tools; or token ids with their mask. Nothing is dropped: a role, a
layout or a content that is not known is an error, and a chat with images or sound is refused whole.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import PrepareError
from headrace.kinds import FUNCTION_CALL, ROLES

# Roles that from/value data writes; `prepare.roles` adds others.
FROM_ROLES = {"human": "user", "gpt": "assistant", FUNCTION_CALL: FUNCTION_CALL, "observation": "tool"}
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
_THINKING_PARTS = ("thinking", "reasoning")
_MEDIA = ("image", "audio", "video")
_MASKS = ("loss_mask", "assistant_masks", "labels")
IGNORED_LABEL = -100

Row = Mapping[str, Any]


class UnknownLayout(PrepareError):
    """A row, a role or a content that is in no known layout; `found` is what to count."""

    def __init__(self, expected: str, place: str, found: tuple[str, ...], hint: str) -> None:
        super().__init__(expected, f"{place}: {', '.join(found)}", hint)
        self.counted = found

    def __reduce__(self) -> tuple[Any, ...]:
        expected, place, hint = self.args
        return type(self), (expected, place.partition(": ")[0], self.counted, hint)


@dataclass(frozen=True)
class Read:
    """What a row says: messages and tools, or ids and mask; `refused` names why the chat cannot be used."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    refused: str = ""


def read_row(row: Row, place: str, layout: str, roles: Mapping[str, str]) -> Read:
    """Read one row.

    Args: layout: a key of LAYOUTS, or auto. roles: other names of roles, each with the role it stands for.
    Raises: UnknownLayout, PrepareError, both naming the place.
    """
    chosen = _detected(row, place) if layout == "auto" else layout
    if chosen == "ids":
        return _ids(row, place)
    try:
        turns = LAYOUTS[chosen](row)
    except (KeyError, TypeError, ValueError) as exc:
        raise UnknownLayout(f"the layout {chosen}", place, (f"keys {sorted(row)}",), f"{exc}; check layout") from exc
    media = {kind for kind in _MEDIA if any(row.get(key) for key in (kind, kind + "s"))}
    messages = [_message(turn, place, roles, media) for turn in turns]
    if media:
        return Read(refused="has_" + "_and_".join(sorted(media)))
    return Read(messages, _tools(row.get("tools"), place))


def _detected(row: Row, place: str) -> str:
    found = [name for name, keys in _KEYS.items() if all(_given(row, key) for key in keys)]
    if "ids" in found and not any(row.get(key) is not None for key in _MASKS):
        found.remove("ids")
    # Hub data often carries the first prompt beside the chat that begins with it.
    if "messages" in found and set(found) <= {"messages", "prompt"}:
        return "messages"
    if len(found) == 1:
        return found[0]
    hint = "convert the file, or name the layout in prepare.data" if found else "convert the file to a known layout"
    expected = "one of " + "; ".join(f"{name}: {' and '.join(keys)}" for name, keys in _KEYS.items())
    raise UnknownLayout(expected, place, (f"keys {sorted(row)}",), hint)


_KEYS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt",),
    "instruction": ("instruction", "output"),
    "ids": ("input_ids",),
}


def _given(row: Row, key: str) -> bool:
    kind = list if key in ("messages", "conversations", "input_ids") else str
    return isinstance(row.get(key), kind) and (kind is str or bool(row[key]))


def _from_messages(row: Row) -> list[Any]:
    return _list(row["messages"])


def _from_conversations(row: Row) -> list[Any]:
    turns = _list(row["conversations"])
    return [*_system(row), *turns]


def _from_prompt(row: Row) -> list[Any]:
    """`prompt` with `response` or `completion`, as text or as messages."""
    given = [row["prompt"], *(row[key] for key in ("response", "completion") if row.get(key) is not None)]
    if len(given) > 2:
        raise ValueError("both response and completion")
    turns: list[Any] = _system(row)
    for role, said in zip(("user", "assistant"), given, strict=False):
        turns += [{"role": role, "content": said}] if isinstance(said, str) else _list(said)
    return turns


def _from_instruction(row: Row) -> list[Any]:
    if row.get("history"):
        raise ValueError("history is not read: use messages")
    asked = row["instruction"] + ("\n\n" + row["input"] if row.get("input") else "")
    return [*_system(row), {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


LAYOUTS: dict[str, Callable[[Row], list[Any]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "prompt": _from_prompt,
    "instruction": _from_instruction,
}


def _system(row: Row) -> list[Any]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"a list that is not empty is needed, not {type(value).__name__}")
    return value


def _ids(row: Row, place: str) -> Read:
    """`input_ids` with `loss_mask`, `assistant_masks`, or `labels` that are -100 where nothing is trained."""
    ids = row.get("input_ids")
    named = [key for key in _MASKS if row.get(key) is not None]
    if len(named) != 1:
        raise PrepareError(f"input_ids with one of {', '.join(_MASKS)}", f"{place}: {sorted(row)}", "name the mask")
    mask = row[named[0]]
    if named[0] == "labels" and isinstance(mask, list):
        if isinstance(ids, list) and any(a not in (b, IGNORED_LABEL) for a, b in zip(mask, ids, strict=False)):
            raise PrepareError("labels equal to input_ids or -100", f"{place}: others", "do not shift the labels")
        mask = [int(label != IGNORED_LABEL) for label in mask]
    whole = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask) > 0
    if not whole or not all(_is_id(i) for i in ids or ()) or not all(m in (0, 1) for m in mask):
        raise PrepareError(
            f"ids from 0 up, and a {named[0]} as long as they are, of 0 and 1", f"{place}: others", "mend the row"
        )
    return Read(input_ids=list(ids or ()), loss_mask=[int(m) for m in mask])


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _message(turn: Any, place: str, roles: Mapping[str, str], media: set[str]) -> dict[str, Any]:
    """One message; kinds of media it holds are added to `media`."""
    said = _renamed(turn, place)
    role = said.get("role")
    known = {**{name: name for name in ROLES}, **(FROM_ROLES if "from" in turn else {}), **roles}
    if not isinstance(role, str) or role not in known:
        hint = f"say in prepare.roles which role it stands for, as {{{role}: user}}"
        raise UnknownLayout(f"a role among {sorted(known)}", place, (repr(role),), hint)
    if known[role] == FUNCTION_CALL:
        return {"role": "assistant", "content": "", "tool_calls": _calls_of_text(said.get("content"), place)}
    said["role"] = known[role]
    _flatten(said, place, media)
    if said.get("tool_calls"):
        said["tool_calls"] = [_call(call, place) for call in said["tool_calls"]]
    elif "tool_calls" in said:
        del said["tool_calls"]  # templates ask whether the key is there
    return said


def _renamed(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UnknownLayout("a mapping for each message", place, (repr(turn)[:80],), "mend or remove the row")
    if "from" in turn and "role" not in turn:
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        return {"role": turn["from"], "content": turn.get("value"), **rest}
    return dict(turn)


def _flatten(said: dict[str, Any], place: str, media: set[str]) -> None:
    """Make the content text: parts of text are joined by a newline, as vLLM does for templates that take text."""
    content = said.get("content")
    if isinstance(content, str):
        return
    if content is None and said["role"] == "assistant" and (said.get("tool_calls") or _thinks(said)):
        said["content"] = ""
        return
    if not isinstance(content, list):
        raise PrepareError(
            "text, or a list of typed parts, as the content of each message",
            f"{place}: {type(content).__name__}",
            "mend or remove the row",
        )
    texts, thoughts = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if kind in _TEXT_PARTS:
            texts.append(_text(part, ("text",), place))
        elif kind in _THINKING_PARTS and said["role"] == "assistant":
            thoughts.append(_text(part, (*_THINKING_PARTS, "text"), place))
        elif isinstance(kind, str) and any(name in kind for name in _MEDIA):
            media.update(name for name in _MEDIA if name in kind)
        else:
            hint = "convert the part to text, or remove the chat"
            raise UnknownLayout(f"parts of type {', '.join(_TEXT_PARTS)}", place, (f"type {kind!r}",), hint)
    said["content"] = "\n".join(texts)
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)


def _thinks(said: Row) -> bool:
    return any(said.get(name) for name in THINKING_FIELDS)


def _text(part: Any, names: tuple[str, ...], place: str) -> str:
    if isinstance(part, str):
        return part
    for name in names:
        if isinstance(part.get(name), str):
            return str(part[name])
    raise PrepareError("text in each part of text", f"{place}: {sorted(part)}", "mend or remove the row")


def _call(call: Any, place: str) -> dict[str, Any]:
    """A call whose arguments are a mapping, as engines hand them to templates, whichever way they were written."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PrepareError("a name in each tool call", f"{place}: {repr(call)[:80]}", "mend or remove the row")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None  # what a model wrote need not be JSON
        arguments = parsed if isinstance(parsed, dict) else arguments
    rest = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _calls_of_text(text: Any, place: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as exc:
        raise PrepareError(f"JSON in a {FUNCTION_CALL} turn", f"{place}: {exc}", "mend or remove the row") from exc
    return [_call(call, place) for call in (value if isinstance(value, list) else [value])]


def _tools(given: Any, place: str) -> list[dict[str, Any]]:
    """Tools as a list, though some data keeps them as JSON in text; a bare function is wrapped as an API would."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "[]")
        except ValueError as exc:
            raise PrepareError("JSON in tools", f"{place}: {exc}", "mend or remove the row") from exc
    if not given:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise PrepareError("a list of tools", f"{place}: {type(given).__name__}", "mend or remove the row")
    return [tool if "name" not in tool else {"type": "function", "function": tool} for tool in given]
