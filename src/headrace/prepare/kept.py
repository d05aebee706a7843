"""What a chat holds and a template must not leave out: thinking, calls of tools, their results, the tools themselves.

In: a chat as it will be rendered, and its template. Out: nothing, or an error that names what would be lost. A target
that is served this way never sees it, so a drafter trained on the rest would learn other conversations than it meets.
"""

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import PrepareError
from headrace.prepare.layouts import THINKING_FIELDS
from headrace.prepare.template import THINK, ChatTemplate, Messages


class NotKept(PrepareError):
    """The template leaves out part of the chat; `what` is counted, the chat is left out whole."""

    def __init__(self, what: str, found: str) -> None:
        super().__init__(f"a template that renders {what}", found, "use a template that does, or other chats")
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.args[1])


def thought_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """The thinking of a message, from its field or from inside the content, and the rest of the content."""
    content = str(message.get("content") or "")
    field = next((str(message[name]) for name in THINKING_FIELDS if message.get(name)), "")
    if field or THINK[1] not in content:
        return field, content
    before, _, after = content.rpartition(THINK[1])
    return before.rpartition(THINK[0])[2], after


def check_kept(template: ChatTemplate, messages: Messages, tools: Messages) -> None:
    """Compare a chat with its rendered text. Raises: NotKept; TemplateRefused when the template raises for the chat."""
    if tools and not template.mentions("tools"):
        raise NotKept("tools", f"{len(tools)} tools and a template that does not read them")
    for i, message in enumerate(messages):
        thought = thought_of(message)[0].strip() if message["role"] == "assistant" else ""
        # Thinking must stand where it was written; in later turns templates strip it, and are served so.
        opens = thought and template.rendered(messages[:i], True, tools).rstrip().endswith(THINK[0]) if i else ""
        if thought and i and not opens and not _stands(thought, template.rendered(messages[: i + 1], False, tools)):
            raise NotKept("thinking", f"turn {i} without its {len(thought)} characters of thinking")
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        _check_tool_turns(template.rendered(messages, False, tools), messages)


def _check_tool_turns(text: str, messages: Messages) -> None:
    for i, message in enumerate(messages):
        if message["role"] == "tool" and not _stands(message["content"].strip(), text):
            raise NotKept("tool_results", f"turn {i} without its result")
        if message.get("tool_calls") and not _stands(thought_of(message)[1].strip(), text):
            raise NotKept("content", f"turn {i} without what is said beside its calls")
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise NotKept("tool_calls", f"turn {i} without its call of {call['function']['name']}")


def _stands(part: str, text: str) -> bool:
    """As it is, or as JSON would write it."""
    return part in text or json.dumps(part)[1:-1] in text or json.dumps(part, ensure_ascii=False)[1:-1] in text
