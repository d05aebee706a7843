"""Masks of turns that call tools, think, or are marked; checked on small templates."""

from typing import Any

import pytest

from headrace.prepare.mask import BoundaryUnclear, Trained, masked_samples
from headrace.prepare.template import ChatTemplate, TemplateRefused
from tests.prepare.tiny import NEEDS_A_USER, PLAIN, byte_tokenizer, chat

END = "<|im_end|>"
HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + HEAD + "{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ '<call>' + c.function.name + c.function.arguments | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
OPENS_THINKING = (
    "{% for m in messages %}" + HEAD + "{{ m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
NEXT_TURN_ENDS = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": "cat"}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "yes"},
]


def trained(text: str, messages: list[dict[str, Any]], tools: Any = (), what: Trained | None = None) -> list[list[str]]:
    """Text of each run of trained tokens, of each sample."""
    made = byte_tokenizer(text, END)
    found = []
    for ids, mask in masked_samples(ChatTemplate(made), messages, tools, what):
        runs, before = [], 0
        for token, mark in zip(ids.tolist(), mask.tolist(), strict=True):
            if mark:
                runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
            before = mark
        found.append([made.decode(run) for run in runs])
    return found


def test_calls_are_trained_and_results_are_not() -> None:
    call = '<call>add{"a": 12, "b": "cat"}</call>'
    assert trained(CALLS, TOOL_CHAT) == [["so" + call + call + END, "yes" + END]]


def test_arguments_can_be_left_out_name_and_braces_stay() -> None:
    (runs,) = trained(CALLS, TOOL_CHAT, what=Trained(tool_arguments=False))
    assert runs == ["so<call>add{", "}</call><call>add{", "}</call>" + END, "yes" + END]


def test_the_last_turn_alone_is_trained_on_the_same_ids() -> None:
    template = ChatTemplate(byte_tokenizer(CALLS, END))
    ((ids, _),) = masked_samples(template, TOOL_CHAT)
    ((last, _),) = masked_samples(template, TOOL_CHAT, what=Trained(last_turn_only=True))
    assert ids.tolist() == last.tolist()
    assert trained(CALLS, TOOL_CHAT, what=Trained(last_turn_only=True)) == [["yes" + END]]


def test_a_turn_that_is_only_a_call_is_a_turn() -> None:
    messages = [TOOL_CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert trained(CALLS, messages) == [['<call>add{"a": 12, "b": "cat"}</call>' + END]]


@pytest.mark.parametrize("mark", [{"loss": False}, {"weight": 0}])
def test_a_turn_that_the_data_takes_out_is_context(mark: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = chat("user: hi", "assistant: yes", "user: ok", "assistant: no")  # type: ignore[assignment]
    messages[1] |= mark
    assert trained(CALLS, messages) == [["no" + END]]


def test_thinking_goes_on_where_the_prompt_opened_it() -> None:
    messages = chat("user: hi", "assistant: a cat </think> yes")
    assert trained(OPENS_THINKING, messages) == [["a cat </think> yes" + END]]  # type: ignore[arg-type]
    both = chat("user: hi", "assistant: <think>a cat</think>yes")
    assert trained(OPENS_THINKING, both) == [["a cat</think>yes" + END]]  # type: ignore[arg-type]
    field: list[dict[str, Any]] = chat("user: hi", "assistant: yes")  # type: ignore[assignment]
    field[1]["reasoning"] = "a cat"
    assert trained(OPENS_THINKING, field) == [["a cat\n</think>\n\nyes" + END]]


def test_an_answer_without_thinking_does_not_fit_a_prompt_that_opens_it() -> None:
    with pytest.raises(BoundaryUnclear, match="otherwise than it was asked for"):
        trained(OPENS_THINKING, chat("user: hi", "assistant: yes"))  # type: ignore[arg-type]


def test_generation_blocks_say_what_is_trained_of_a_turn() -> None:
    messages: list[dict[str, Any]] = chat("user: hi", "assistant: yes", "user: ok", "assistant: no")  # type: ignore[assignment]
    assert trained(MARKED, messages) == [["yes" + END, "no" + END]]
    without_end = MARKED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert trained(without_end, messages) == [["yes", "no"]]
    nothing = MARKED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ m['content'] + '<|im_end|>' }}"
    )
    with pytest.raises(BoundaryUnclear, match="`generation` block"):
        trained(nothing, messages)


def test_what_opens_the_next_turn_ends_one_if_the_target_stops_there() -> None:
    made = byte_tokenizer(NEXT_TURN_ENDS, "<eos>")
    made.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    messages = chat("user: hi", "assistant: yes", "user: ok", "assistant: no")
    with pytest.raises(BoundaryUnclear, match=r"generation_config\.json"):
        masked_samples(ChatTemplate(made), messages)
    stop = made.convert_tokens_to_ids("<|user|>")
    ((ids, mask),) = masked_samples(ChatTemplate(made, stops=[stop]), messages)
    assert made.decode(ids[mask.astype(bool)]) == "yes<|user|>no<|user|>"


def test_an_assistant_who_opens_behind_a_system_text_is_context_where_a_user_is_needed() -> None:
    needs = NEEDS_A_USER.replace(
        "messages[0]['role'] != 'user'", "messages | selectattr('role', 'eq', 'user') | list | length == 0"
    )
    needs = needs.replace("<|end|>", END)
    messages = chat("system: ok", "assistant: hello", "user: hi", "assistant: yes")
    assert trained(needs, messages) == [["yes" + END]]  # type: ignore[arg-type]
    assert trained(PLAIN.replace("<|end|>", END), messages) == [["hello" + END, "yes" + END]]  # type: ignore[arg-type]


def test_two_newlines_that_join_in_one_token_are_still_told_apart() -> None:
    """Qwen's tokenizer has a token for two newlines; the prompt ends between them."""
    text = CALLS.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] }}",
    )
    text = text.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    made = byte_tokenizer(text, END)
    made.add_tokens(["\n\n"])
    template = ChatTemplate(made)
    messages = chat("user: hi", "assistant: yes")
    prompt = template.ids(messages[:1], prompt=True)
    assert template.ids(messages, prompt=False)[: len(prompt)] != prompt
    ((ids, mask),) = masked_samples(template, messages)
    assert ids.tolist()[: len(prompt)] == prompt
    assert made.decode(ids[mask.astype(bool)]) == "yes" + END


def test_bos_twice_is_refused() -> None:
    made = byte_tokenizer("{{ bos_token }}" + CALLS, END)
    assert masked_samples(ChatTemplate(made), chat("user: hi", "assistant: yes"))
    with pytest.raises(TemplateRefused, match="one BOS token"):
        masked_samples(ChatTemplate(made, "{{ bos_token + bos_token }}" + CALLS), chat("user: hi", "assistant: yes"))
