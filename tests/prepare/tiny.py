"""A word-level tokenizer and small templates of the kinds that templates come in."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "hello hi you me what is two three four and plus the a cat dog ok yes no system user assistant tool".split()
SPECIAL = ["<unk>", "<|start|>", "<|end|>", "<bos>", "<think>", "</think>"]

PLAIN = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
BOS = "<bos>" + PLAIN
THINKS_IN_THE_LAST_TURN = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|start|>' + m['role'] + '\n' + text + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
NEEDS_A_USER = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user must speak first') }}{% endif %}" + PLAIN
)


def tokenizer(template: str = PLAIN) -> Any:
    """One token a word, one for each special token, one for a newline."""
    words = [*SPECIAL, "\n", *WORDS]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<|end|>", additional_special_tokens=SPECIAL[1:]
    )
    made.chat_template = template
    return made


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from `role: text`."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
