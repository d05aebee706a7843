"""Chats from JSONL files.

In: rows with `messages` (role, content), or with `prompt` and `response`. Out: chats with the place they come from.
Anything else is an error that lists what was found; a broken line is an error that names it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import PrepareError
from headrace.prepare.demo import demo_prompts

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MOST_LEVELS = 64
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")


def written(message: Mapping[str, Any]) -> str:
    """All text that the author of a message wrote, blank text left out; empty when nothing was said."""
    texts = (message.get(field) for field in TEXT_FIELDS)
    return "\n".join(text for text in texts if isinstance(text, str) and text.strip())


@dataclass(frozen=True)
class Chat:
    """One conversation, and where it stands."""

    messages: tuple[dict[str, Any], ...]
    source: str
    place: str
    tools: bool = False

    def prompt(self) -> tuple[dict[str, Any], ...]:
        """The messages before the last assistant turn, if the chat ends with one; else all."""
        return self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages


def read_chats(data: list[str], num_demo_prompts: int) -> Iterator[Chat]:
    """Yield the chats of each named file in turn; `demo` stands for the built-in prompts.

    Raises: PrepareError for no file, an empty file, a broken line, an unknown layout or role.
    """
    for name in data:
        if name == "demo":
            for number, row in enumerate(demo_prompts(num_demo_prompts), 1):
                yield Chat(tuple(row["messages"]), row["source"], f"demo:{number}")
        else:
            yield from _read_file(Path(name))


def _read_file(path: Path) -> Iterator[Chat]:
    num_rows = 0
    try:
        with open(path, "rb") as source:
            for number, line in enumerate(source, 1):
                if line.strip():
                    num_rows += 1
                    yield _chat(line, path, f"{path}:{number}")
    except OSError as exc:
        raise PrepareError("a readable JSONL file", str(exc), "check prepare.data") from exc
    if not num_rows:
        raise PrepareError("at least one chat", f"{path} is empty", "check prepare.data")


def _chat(line: bytes, path: Path, place: str) -> Chat:
    row = _row(line, place)
    source = row.get("source") if isinstance(row.get("source"), str) else path.stem
    messages = tuple(_messages(row, place))
    tools = bool(row.get("tools")) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    return Chat(messages, str(source), place, tools)


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        _check_levels(row)
        json.dumps(row, ensure_ascii=False).encode()  # an escape may stand for half a character, which nothing can hold
    except UnicodeError as exc:
        raise PrepareError("UTF-8 text", f"{place}: {exc}", "mend or remove the line") from exc
    except (ValueError, RecursionError) as exc:
        raise PrepareError("a JSON object on each line", f"{place}: {exc}", "mend or remove the line") from exc
    if not isinstance(row, dict):
        raise PrepareError("a JSON object on each line", f"{place}: a {type(row).__name__}", "mend or remove the line")
    return row


def _check_levels(value: Any, left: int = MOST_LEVELS) -> None:
    """Later code walks a chat deeper in the stack than the reader did."""
    if not left:
        raise ValueError(f"more than {MOST_LEVELS} levels, one inside the other")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_levels(inner, left - 1)


def _messages(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    if isinstance(row.get("messages"), list) and row["messages"]:
        return [_message(m, place) for m in row["messages"]]
    if isinstance(row.get("prompt"), str):
        chat = [{"role": "user", "content": row["prompt"]}]
        if isinstance(row.get("response"), str):
            chat.append({"role": "assistant", "content": row["response"]})
        return chat
    raise PrepareError(
        "`messages` (a list of role and content), or `prompt` with `response`",
        f"{place}: keys {sorted(row)}",
        "convert the file to one of these layouts",
    )


def _message(message: Any, place: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else message
    if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
        raise PrepareError(f"a role among {sorted(ROLES)}", f"{place}: {role!r}", "rename the role")
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise PrepareError("text as the content of each message", f"{place}: {kind}", "only text is read so far")
    return message
