"""The mask covers what the target generates, and nothing else."""

import pytest

from headrace.errors import PrepareError
from headrace.prepare.mask import BoundaryUnclear, masked_samples
from headrace.prepare.template import ChatTemplate
from tests.prepare.tiny import (
    BOS,
    NEEDS_A_USER,
    NO_END,
    PLAIN,
    THINKS_IN_THE_LAST_TURN,
    chat,
    tokenizer,
)


def trained(template: str, *turns: str) -> list[list[str]]:
    """The trained tokens of each sample of a chat."""
    made = tokenizer(template)
    samples = masked_samples(ChatTemplate(made), chat(*turns))
    return [made.convert_ids_to_tokens(ids[mask.astype(bool)].tolist()) for ids, mask in samples]


def test_a_two_turn_chat_with_a_short_user_turn_supervises_no_user_token() -> None:
    got = trained(PLAIN, "user: hello you", "assistant: hi", "user: ok", "assistant: yes the cat")
    assert got == [["hi", "<|end|>", "yes", "the", "cat", "<|end|>"]]


def test_the_newline_behind_the_end_marker_is_the_templates() -> None:
    made = tokenizer(PLAIN)
    ((ids, mask),) = masked_samples(ChatTemplate(made), chat("user: hi", "assistant: yes", "user: ok", "assistant: no"))
    after_first = made.convert_ids_to_tokens(ids.tolist()).index("<|end|>", 6) + 1
    assert made.convert_ids_to_tokens([int(ids[after_first])]) == ["\n"]
    assert mask[after_first] == 0
    assert made.convert_ids_to_tokens([int(ids[-1])]) == ["<|end|>"]


def test_repeated_text_in_two_turns_is_told_apart() -> None:
    got = trained(PLAIN, "user: yes", "assistant: yes", "user: yes", "assistant: yes")
    assert got == [["yes", "<|end|>", "yes", "<|end|>"]]


def test_a_template_that_strips_earlier_thinking_gives_one_sample_a_turn() -> None:
    turns = ("user: hi", "assistant: <think> a cat </think> yes", "user: ok", "assistant: <think> dog </think> no")
    got = trained(THINKS_IN_THE_LAST_TURN, *turns)
    assert got == [
        ["<think>", "a", "cat", "</think>", "yes", "<|end|>"],
        ["<think>", "dog", "</think>", "no", "<|end|>"],
    ]


def test_a_bos_of_the_template_stands_once_and_is_not_trained() -> None:
    made = tokenizer(BOS)
    ((ids, mask),) = masked_samples(ChatTemplate(made), chat("user: hi", "assistant: yes"))
    tokens = made.convert_ids_to_tokens(ids.tolist())
    assert tokens.count("<bos>") == 1
    assert mask[tokens.index("<bos>")] == 0


def test_an_opening_assistant_turn_is_context() -> None:
    assert trained(PLAIN, "assistant: hello", "user: hi", "assistant: ok") == [["ok", "<|end|>"]]


def test_an_empty_answer_trains_its_end_marker_alone() -> None:
    assert trained(PLAIN, "user: hi", "assistant: ") == [["<|end|>"]]


def test_a_template_without_an_end_marker_is_not_guessed_at() -> None:
    with pytest.raises(BoundaryUnclear, match="none in a rendered answer"):
        trained(NO_END, "user: hi", "assistant: yes")


def test_a_prompt_that_is_no_prefix_is_not_guessed_at() -> None:
    other = PLAIN.replace("{{ '<|start|>assistant\n' }}", "{{ '<|start|>assistant\n<think>' }}")
    with pytest.raises(BoundaryUnclear, match="otherwise than it was asked for"):
        trained(other, "user: hi", "assistant: yes")


def test_a_template_that_refuses_a_chat_says_so() -> None:
    with pytest.raises(PrepareError, match="a user must speak first"):
        trained(NEEDS_A_USER, "system: ok", "assistant: yes")


def test_a_chat_without_an_answer_gives_no_sample() -> None:
    assert trained(PLAIN, "user: hi") == []
