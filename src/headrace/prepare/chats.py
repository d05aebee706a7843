"""Chats from every source of a run, mixed by weights and caps.

In: sources, read row by row and brought to one form. Out: chats with the source and place they come from. What no
layout knows is an error that lists all that was found in the source; a broken line is an error that names it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import xxhash

from headrace.errors import PrepareError
from headrace.kinds import DEMO_DATA, DataSource
from headrace.prepare.demo import demo_prompts
from headrace.prepare.layouts import THINKING_FIELDS, Read, UnknownLayout, read_row
from headrace.prepare.rows import read_rows, source_name

TEXT_FIELDS = ("content", *THINKING_FIELDS)


def written(message: Mapping[str, Any]) -> str:
    """All that the author of a message wrote, calls of tools too, blank text left out; empty when nothing was said."""
    texts = [message.get(field) for field in TEXT_FIELDS]
    if message.get("tool_calls"):
        texts.append(json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
    return "\n".join(text for text in texts if isinstance(text, str) and text.strip())


@dataclass(frozen=True)
class Chat:
    """One conversation, and where it stands; or token ids with their mask; `refused` names why it cannot be used."""

    messages: tuple[dict[str, Any], ...]
    source: str
    place: str
    tools: tuple[dict[str, Any], ...] = ()
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    refused: str = ""

    def prompt(self) -> tuple[dict[str, Any], ...]:
        """The messages before the last assistant turn, if the chat ends with one; else all."""
        ends = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return self.messages[:-1] if ends else self.messages


def read_chats(
    data: Sequence[str | DataSource], num_demo_prompts: int, roles: Mapping[str, str] | None = None
) -> Iterator[Chat]:
    """Yield the chats of each source in turn; `demo` stands for the built-in prompts.

    Args: roles: other names of roles, each with the role it stands for.
    Raises: PrepareError for a source that cannot be read or is empty, a broken line, an unknown layout or role.
    """
    for source in map(DataSource.of, data):
        chats = _demo(num_demo_prompts) if source.path == DEMO_DATA else _chats(source, roles or {})
        if source.weight < 1:
            chats = (chat for chat in chats if _taken(chat, source.weight))
        yield from islice(chats, source.max_chats)


def _demo(number: int) -> Iterator[Chat]:
    for place, row in enumerate(demo_prompts(number), 1):
        yield Chat(tuple(row["messages"]), row["source"], f"demo:{place}")


def _taken(chat: Chat, weight: float) -> bool:
    """Decide by content alone, so that a source that has grown still gives what it gave."""
    content = json.dumps([chat.messages, chat.input_ids], ensure_ascii=False, default=str).encode()
    return int(xxhash.xxh3_64_intdigest(b"weight\n" + content)) < weight * 2**64


def _chats(source: DataSource, roles: Mapping[str, str]) -> Iterator[Chat]:
    name, rows = source_name(source), read_rows(source)
    for row, place in rows:
        try:
            read = read_row(row, place, source.layout, roles)
        except UnknownLayout as exc:
            raise _with_counts(exc, source, roles, rows) from exc
        own = row["source"] if isinstance(row.get("source"), str) and source.name is None else name
        yield _chat(read, own, place)


def _chat(read: Read, source: str, place: str) -> Chat:
    ids = None if read.input_ids is None else tuple(read.input_ids)
    mask = None if read.loss_mask is None else tuple(read.loss_mask)
    return Chat(tuple(read.messages), source, place, tuple(read.tools), ids, mask, read.refused)


def _with_counts(
    first: UnknownLayout, source: DataSource, roles: Mapping[str, str], rest: Iterator[tuple[dict[str, Any], str]]
) -> PrepareError:
    """The error of the first row that is not known, with all that the rest of the source holds of its kind."""
    counts = Counter(first.counted)
    with suppress(PrepareError):  # a line that is broken shows once this fault is mended
        for row, place in rest:
            try:
                read_row(row, place, source.layout, roles)
            except UnknownLayout as exc:
                counts.update(exc.counted)
    expected, found, hint = first.args
    listed = ", ".join(f"{what} in {number}" for what, number in counts.most_common(12))
    more = f"; in all: {listed} rows" if sum(counts.values()) > 1 else ""
    return PrepareError(expected, found + more, hint)
