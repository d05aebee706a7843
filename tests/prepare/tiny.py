"""A word-level tokenizer and small templates of the kinds that templates come in."""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
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
ALWAYS_A_THINK_BLOCK = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in text %}"
    "{% set text = '<think>\n' + m.get('reasoning_content', '') + '\n</think>\n\n' + text %}"
    "{% endif %}"
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


def tokenizer(template: str = PLAIN, adds_bos: bool = False) -> Any:
    """One token a word, one for each special token, one for a newline."""
    words = [*SPECIAL, "\n", *WORDS]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<|end|>", additional_special_tokens=SPECIAL[1:]
    )
    made.chat_template = template
    return made


def byte_tokenizer(template: str, eos: str) -> Any:
    """One token a byte, and one for each mark that a public template writes; thinking marks are not special."""
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    marks = sorted({eos, *re.findall(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>", template)})
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token="<s>", extra_special_tokens=marks)
    made.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    made.chat_template = template
    return made


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from `role: text`."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
