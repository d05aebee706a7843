"""A template that leaves out part of a chat is found out."""

import pickle
from typing import Any

import pytest

from headrace.prepare.kept import NotKept, check_kept, thought_of
from headrace.prepare.template import ChatTemplate
from tests.prepare.test_turns import CALLS, END, TOOL_CHAT
from tests.prepare.tiny import PLAIN, byte_tokenizer, chat


def lost(text: str, messages: list[dict[str, Any]], tools: Any = ()) -> str:
    with pytest.raises(NotKept) as found:
        check_kept(ChatTemplate(byte_tokenizer(text, END)), messages, tools)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)
    return found.value.what


def test_all_that_is_rendered_is_kept() -> None:
    check_kept(ChatTemplate(byte_tokenizer(CALLS, END)), TOOL_CHAT, [{"type": "function"}])


def test_what_a_plain_template_loses_is_named() -> None:
    thinks: list[dict[str, Any]] = chat("user: hi", "assistant: yes")  # type: ignore[assignment]
    thinks[1]["reasoning_content"] = "a cat"
    assert lost(PLAIN, thinks) == "thinking"
    assert lost(PLAIN, TOOL_CHAT) == "tool_calls"
    assert lost(PLAIN, TOOL_CHAT[:1], [{"type": "function"}]) == "tools"


def test_what_is_said_beside_a_call_is_kept_or_named() -> None:
    """Llama 3.1's own template writes the call and drops the text."""
    drops = CALLS.replace("{{ m['content'] }}", "{% if not m.get('tool_calls') %}{{ m['content'] }}{% endif %}")
    assert lost(drops, TOOL_CHAT) == "content"


def test_a_result_may_stand_as_json_and_may_not_be_left_out() -> None:
    quoted: list[dict[str, Any]] = [*TOOL_CHAT[:2], {"role": "tool", "content": 'a "cat"'}, TOOL_CHAT[3]]
    as_json = CALLS.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% else %}{{ m['content'] }}{% endif %}",
    )
    check_kept(ChatTemplate(byte_tokenizer(as_json, END)), quoted, ())
    without = CALLS.replace("{{ m['content'] }}", "{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}")
    assert lost(without, quoted) == "tool_results"


def test_thinking_that_later_turns_drop_is_as_it_was_served() -> None:
    last_only = "{% for m in messages %}{% set said = m['content'] %}" + (
        "{% if not loop.last %}{% set said = said.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + said + '<|im_end|>' }}{% endfor %}"
    )
    messages = chat("user: hi", "assistant: <think>cat</think>yes", "user: ok", "assistant: <think>dog</think>no")
    check_kept(ChatTemplate(byte_tokenizer(last_only, END)), messages, ())


def test_thinking_is_found_in_its_field_or_in_the_content() -> None:
    assert thought_of({"content": "yes", "thinking": "hm"}) == ("hm", "yes")
    assert thought_of({"content": "<think>hm</think>yes"}) == ("hm", "yes")
    assert thought_of({"content": "hm</think>yes"}) == ("hm", "yes")
    assert thought_of({"content": None}) == ("", "")
