"""Templates render whole conversations; hashes tell tokenizers and templates apart."""

from pathlib import Path

import pytest

from headrace.errors import PrepareError
from headrace.prepare.template import ChatTemplate, TemplateRefused, read_template, template_hash, tokenizer_hash
from tests.prepare.tiny import BOS, NEEDS_A_USER, PLAIN, chat, tokenizer


def test_a_prompt_ends_where_the_target_begins_to_write() -> None:
    made = tokenizer()
    ids = ChatTemplate(made).ids(chat("user: hi"), prompt=True)
    assert made.convert_ids_to_tokens(ids)[-3:] == ["<|start|>", "assistant", "\n"]


def test_hashes_tell_templates_and_tokenizers_apart() -> None:
    assert template_hash(PLAIN) != template_hash(BOS)
    assert tokenizer_hash(tokenizer()) == tokenizer_hash(tokenizer(BOS))
    other = tokenizer()
    other.add_tokens(["new"])
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer())


def test_a_given_template_replaces_the_tokenizers() -> None:
    assert ChatTemplate(tokenizer(PLAIN), BOS).text == BOS


def test_no_template_at_all_is_an_error() -> None:
    made = tokenizer()
    made.chat_template = None
    with pytest.raises(PrepareError, match=r"target\.chat_template"):
        ChatTemplate(made)


def test_template_arguments_reach_the_template() -> None:
    text = PLAIN + "{% if extra %}{{ ' cat' }}{% endif %}"
    made = tokenizer(text)
    ids = ChatTemplate(made, args={"extra": True}).ids(chat("user: hi"), prompt=True)
    assert made.convert_ids_to_tokens(ids)[-1] == "cat"


def test_a_missing_template_file_is_an_error(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(PrepareError, match="a template file"):
        ChatTemplate.of(tmp_path, str(tmp_path / "none.jinja"), {})


@pytest.mark.parametrize(("content", "found"), [(b"\xff\xfe", "utf-8"), (b" \n", "is blank")])
def test_a_template_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "odd.jinja"
    path.write_bytes(content)
    with pytest.raises(PrepareError, match=rf"odd\.jinja.*{found}"):
        read_template(str(path))
    with pytest.raises(PrepareError, match=r"none\.jinja"):
        read_template(str(tmp_path / "none.jinja"))


def test_special_tokens_may_end_a_turn_and_words_may_not() -> None:
    made = tokenizer()
    marks = ChatTemplate(made).end_tokens
    assert marks[made.convert_tokens_to_ids("<|end|>")] == "<|end|>"
    assert made.convert_tokens_to_ids("cat") not in marks


def test_a_template_that_raises_is_told_by_its_message() -> None:
    with pytest.raises(TemplateRefused, match="a user must speak first"):
        ChatTemplate(tokenizer(NEEDS_A_USER)).ids(chat("system: ok"), prompt=True)


@pytest.mark.parametrize("expression", ["1 // 0", "messages[0]['content'].split('')", "'%d' % 'x'"])
def test_what_an_expression_raises_is_the_chats_refusal(expression: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(tokenizer("{{ " + expression + " }}" + PLAIN)).ids(chat("user: hi"), prompt=True)


def test_thinking_marks_are_known_where_they_are_tokens() -> None:
    made = tokenizer()
    assert ChatTemplate(made).think_ids == (made.get_vocab()["<think>"], made.get_vocab()["</think>"])
