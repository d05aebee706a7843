"""The mask covers what the target generates, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PrepareError
from headrace.prepare.mask import BoundaryUnclear, masked_samples
from headrace.prepare.template import ChatTemplate
from tests.prepare.tiny import (
    ALWAYS_A_THINK_BLOCK,
    BOS,
    NEEDS_A_USER,
    NO_END,
    PLAIN,
    THINKS_IN_THE_LAST_TURN,
    WORDS,
    byte_tokenizer,
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
    made = tokenizer(BOS, adds_bos=True)
    assert made.convert_ids_to_tokens(made("hi")["input_ids"])[0] == "<bos>"
    ((ids, mask),) = masked_samples(ChatTemplate(made), chat("user: hi", "assistant: yes"))
    tokens = made.convert_ids_to_tokens(ids.tolist())
    assert tokens.count("<bos>") == 1
    assert mask[tokens.index("<bos>")] == 0


def test_an_opening_assistant_turn_is_context() -> None:
    assert trained(PLAIN, "assistant: hello", "user: hi", "assistant: ok") == [["ok", "<|end|>"]]


def test_an_empty_turn_is_context_and_alone_gives_no_sample() -> None:
    assert trained(PLAIN, "user: hi", "assistant: ") == []
    assert trained(PLAIN, "user: hi", "assistant: ", "user: ok", "assistant: yes") == [["yes", "<|end|>"]]


def test_a_one_token_answer_trains_it_and_its_end_marker() -> None:
    assert trained(PLAIN, "user: hi", "assistant: yes") == [["yes", "<|end|>"]]


def test_an_empty_think_block_of_the_template_is_not_trained() -> None:
    turns = ("user: hi", "assistant: yes", "user: ok", "assistant: no")
    assert trained(ALWAYS_A_THINK_BLOCK, *turns) == [["yes", "<|end|>"], ["no", "<|end|>"]]


def test_an_empty_think_block_of_the_answer_is_trained() -> None:
    got = trained(ALWAYS_A_THINK_BLOCK, "user: hi", "assistant: <think> </think> yes")
    assert got == [["<think>", "</think>", "yes", "<|end|>"]]


def test_thinking_in_a_field_of_its_own_is_trained() -> None:
    made = tokenizer(ALWAYS_A_THINK_BLOCK)
    messages = [*chat("user: hi", "assistant: yes")]
    messages[1]["reasoning_content"] = "a cat"
    ((ids, mask),) = masked_samples(ChatTemplate(made), messages)
    got = made.convert_ids_to_tokens(ids[mask.astype(bool)].tolist())
    assert [t for t in got if t != "\n"] == ["<think>", "a", "cat", "</think>", "yes", "<|end|>"]


def test_special_tokens_behind_the_end_marker_are_the_templates() -> None:
    after = PLAIN.replace("'<|end|>' + '\n'", "'<|end|>' + '\n' + '<bos>'")
    assert trained(after, "user: hi", "assistant: yes") == [["yes", "<|end|>"]]


def test_an_answer_that_ends_with_a_mark_of_its_own_keeps_it() -> None:
    got = trained(PLAIN, "user: hi", "assistant: <think> a cat </think>")
    assert got == [["<think>", "a", "cat", "</think>", "<|end|>"]]


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


SAID = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)
MADE = tokenizer(PLAIN)


@settings(max_examples=50)
@given(turns=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=4))
def test_trained_tokens_are_the_answers_words_and_end_markers(turns: list[tuple[list[str], list[str]]]) -> None:
    messages = [
        message
        for asked, answered in turns
        for message in chat(f"user: {' '.join(asked)}", f"assistant: {' '.join(answered)}")
    ]
    ((ids, mask),) = masked_samples(ChatTemplate(MADE), messages)
    got = MADE.convert_ids_to_tokens(ids[mask.astype(bool)].tolist())
    assert got == [token for _, answered in turns for token in [*answered, "<|end|>"]]


TEMPLATES = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
PUBLIC = {
    "gemma3": "<end_of_turn>", "gptoss": "<|return|>", "llama3_1": "<|eot_id|>", "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>", "qwen3_5_nothink": "<|im_end|>", "qwen3_6": "<|im_end|>",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates_train_answers_and_nothing_of_the_user(name: str) -> None:
    path = TEMPLATES / "trl" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("needs the shared chat templates beside the project")
    text = path.read_text(encoding="utf-8")
    made = byte_tokenizer(text, PUBLIC[name])
    samples = masked_samples(
        ChatTemplate(made), chat("user: a question", "assistant: yes", "user: a question", "assistant: no cat")
    )
    got = "".join(made.decode(ids[mask.astype(bool)]) for ids, mask in samples)
    wanted = "".join(word + PUBLIC[name] for word in ("yes", "no cat"))
    assert got.replace("<|channel|>final<|message|>", "") == wanted


@pytest.mark.parametrize("name", ["glm4moe", "deepseekv3"])
def test_public_templates_with_unclear_boundaries_are_refused(name: str) -> None:
    path = TEMPLATES / "trl" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("needs the shared chat templates beside the project")
    made = byte_tokenizer(path.read_text(encoding="utf-8"), "<eos>")
    with pytest.raises(BoundaryUnclear):
        masked_samples(ChatTemplate(made), chat("user: a question", "assistant: yes"))
