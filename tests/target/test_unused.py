"""A row no text produces: beyond the tokenizer, else a token that calls itself spare, else none."""

from types import SimpleNamespace
from typing import Any

from headrace.target.unused import unused_row
from headrace.testing.tiny_target import tiny_tokenizer


def tokenizer(**tokens: int) -> Any:
    vocab = {"a": 0, "</s>": 1, **tokens}
    return SimpleNamespace(
        get_vocab=lambda: vocab, pad_token_id=None, eos_token_id=1, bos_token_id=None, unk_token_id=None
    )


def test_padding_rows_of_the_embedding_come_first() -> None:
    assert unused_row(tiny_tokenizer(), 72) == 64
    assert unused_row(tokenizer(**{"<|reserved_0|>": 2}), 8) == 3


def test_a_full_embedding_offers_a_reserved_token_or_none() -> None:
    assert unused_row(tiny_tokenizer(), 64) is None
    assert unused_row(tokenizer(**{"<|reserved_special_token_1|>": 3, "<unused0>": 2}), 4) == 2


def test_a_spare_token_that_stands_for_something_is_left_alone() -> None:
    own = tokenizer(**{"<unused0>": 2})
    own.pad_token_id = 2
    assert unused_row(own, 3) is None
