"""Chats as the target was served them: a tokenizer, a template, and hashes of both.

In: messages. Out: token ids, always rendered as whole conversations, since templates need their context. The hashes
go into fingerprints, so that another tokenizer or template never meets old output.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from headrace.errors import PrepareError
from headrace.prepare.model_files import load_tokenizer
from headrace.record import digest

Messages = Sequence[Mapping[str, Any]]
THINK = ("<think>", "</think>")
# What an expression in a template may raise, besides Jinja's own.
_OF_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateRefused(PrepareError):
    """The template raises for this chat; the chat is left out and counted."""


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash the vocabulary with its ids and the added tokens: 32 hexadecimal digits."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    added = sorted((i, str(t)) for i, t in tokenizer.added_tokens_decoder.items())
    return digest(json.dumps([vocabulary, added], ensure_ascii=False).encode()).hex()


def template_hash(template: str) -> str:
    """Hash a template's text: 32 hexadecimal digits."""
    return digest(template.encode()).hex()


def read_template(path: str) -> str:
    """The text of a template file. Raises: PrepareError when it is missing, blank or not UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PrepareError("a template file in UTF-8", f"{path}: {exc}", "check target.chat_template") from exc
    if not text.strip():
        raise PrepareError("a template", f"{path} is blank", "check target.chat_template")
    return text


class ChatTemplate:
    """A tokenizer with the template and arguments that a run uses."""

    def __init__(self, tokenizer: Any, text: str | None = None, args: Mapping[str, Any] | None = None) -> None:
        """Args: text: replaces the tokenizer's own template. Raises: PrepareError when there is neither."""
        self.tokenizer = tokenizer
        self.text: str = text or tokenizer.chat_template or ""
        self.args = dict(args or {})
        if not self.text:
            raise PrepareError("a chat template", "a tokenizer without one", "set target.chat_template")

    @classmethod
    def of(cls, model: Path | str, template: str | None, args: Mapping[str, Any]) -> "ChatTemplate":
        """Load the tokenizer of a model, and a template file if one is named.

        Raises: TargetError for the tokenizer, PrepareError for the template.
        """
        return cls(load_tokenizer(model), None if template is None else read_template(template), args)

    @property
    def hash(self) -> str:
        """Hash of the template's text."""
        return template_hash(self.text)

    def ids(self, messages: Messages, prompt: bool) -> list[int]:
        """Token ids of a whole conversation; with `prompt`, up to where the target begins to write.

        Raises: TemplateRefused when the template raises for the chat.
        """
        try:
            encoded = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                chat_template=self.text,
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=True,
                **self.args,
            )
        except (jinja2.TemplateError, *_OF_TEMPLATES) as exc:
            roles = [m["role"] for m in messages]
            raise TemplateRefused(
                f"a chat that the template renders (roles {roles})", str(exc), "change the chat"
            ) from exc
        return [int(i) for i in encoded["input_ids"]]

    @cached_property
    def think_ids(self) -> tuple[int | None, int | None]:
        """Ids of the marks around thinking, where they are single tokens."""
        vocabulary = self.tokenizer.get_vocab()
        return vocabulary.get(THINK[0]), vocabulary.get(THINK[1])

    @cached_property
    def end_tokens(self) -> dict[int, str]:
        """Tokens that may end a turn, by id: EOS and the special tokens, for text seldom contains them."""
        special = {int(i): str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        eos = self.tokenizer.eos_token_id
        return special if eos is None else {**special, int(eos): str(self.tokenizer.eos_token)}
