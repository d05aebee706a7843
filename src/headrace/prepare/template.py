"""Chats as the target was served them: a tokenizer, a template, and hashes of both.

In: messages. Out: token ids, always rendered as whole conversations, since templates need their context. The hashes
go into fingerprints, so that another tokenizer or template never meets old output.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from headrace.errors import PrepareError
from headrace.prepare.layouts import THINKING_FIELDS
from headrace.prepare.model_files import load_generation_config, load_tokenizer
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

    def __init__(
        self,
        tokenizer: Any,
        text: str | None = None,
        args: Mapping[str, Any] | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        """Args: text: replaces the tokenizer's own template. stops: ids at which the target stops, EOS apart.

        Raises: PrepareError when there is neither template.
        """
        self.tokenizer = tokenizer
        self.text: str = text or tokenizer.chat_template or ""
        self.args = dict(args or {})
        self.stops = frozenset(stops)
        if not self.text:
            raise PrepareError("a chat template", "a tokenizer without one", "set target.chat_template")

    @classmethod
    def of(cls, model: Path | str, template: str | None, args: Mapping[str, Any]) -> "ChatTemplate":
        """Load the tokenizer of a model, the ids it stops at, and a template file if one is named.

        Raises: TargetError for the model's files, PrepareError for the template.
        """
        tokenizer = load_tokenizer(model)
        generation = load_generation_config(Path(model))
        eos = None if generation is None else generation.eos_token_id
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(tokenizer, None if template is None else read_template(template), args, stops)

    @property
    def hash(self) -> str:
        """Hash of the template's text."""
        return template_hash(self.text)

    def ids(self, messages: Messages, prompt: bool, tools: Messages = ()) -> list[int]:
        """Token ids of a whole conversation; with `prompt`, up to where the target begins to write.

        Raises: TemplateRefused when the template raises for the chat, or begins it with BOS twice.
        """
        encoded = self._render(messages, tools, add_generation_prompt=prompt, tokenize=True, return_dict=True)
        ids = [int(i) for i in encoded["input_ids"]]
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise TemplateRefused("one BOS token", "two at the beginning of a chat", "take one out of the template")
        return ids

    def rendered(self, messages: Messages, prompt: bool, tools: Messages = ()) -> str:
        """The text that `ids` are the tokens of. Raises: TemplateRefused."""
        return str(self._render(messages, tools, add_generation_prompt=prompt, tokenize=False))

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text, nothing added."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def marked(self, messages: Messages, tools: Messages = ()) -> list[bool] | None:
        """For each token of a whole conversation, whether it lies in a `generation` block; None without such blocks.

        Raises: TemplateRefused.
        """
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.text):
            return None
        encoded = self._render(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return [bool(mark) for mark in encoded["assistant_masks"]]

    def served(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with thinking under the name that this template reads, as an engine would give it."""
        name = self.thinking_field
        if name is None or not any(message.get(other) for message in messages for other in THINKING_FIELDS):
            return [dict(message) for message in messages]
        return [_renamed(message, name) for message in messages]

    @cached_property
    def thinking_field(self) -> str | None:
        """The field of a message from which the template reads thinking, if it does."""
        return next((name for name in THINKING_FIELDS if re.search(rf"(\.|['\"]){name}\b", self.text)), None)

    def mentions(self, name: str) -> bool:
        """Whether a name stands in the template's text as a word."""
        return re.search(rf"\b{name}\b", self.text) is not None

    def _render(self, messages: Messages, tools: Messages, **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                self.served(messages),
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.text,
                **how,
                **self.args,
            )
        except (jinja2.TemplateError, *_OF_TEMPLATES) as exc:
            roles = [m["role"] for m in messages]
            raise TemplateRefused(
                f"a chat that the template renders (roles {roles})", str(exc), "change the chat"
            ) from exc

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


def _renamed(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    thinking = next((message[other] for other in (name, *THINKING_FIELDS) if message.get(other)), None)
    rest = {key: value for key, value in message.items() if key not in THINKING_FIELDS}
    return rest if thinking is None else {**rest, name: thinking}
