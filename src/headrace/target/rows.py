"""Key and value rows for batched decoding, allocated once: a row holds one answer, finished rows leave at once.

In: keys and values as a transformers model hands them to its cache. Out: what its attention reads. Each row begins at
place 0 and has its own length, so that nothing is padded on the left, joined or copied as answers grow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from headrace.errors import TargetError
from headrace.target.hooks import text_part

ATTENTION = "headrace_rows"


class Rows:
    """Stands in for a transformers cache; rows 0 to n - 1 are in use, whoever leaves is replaced by the last."""

    def __init__(self, model: PreTrainedModel, num_rows: int, num_tokens: int) -> None:
        """Args: num_tokens: longest prompt plus answer. Raises: TargetError for attention that is not full."""
        config = model.config.get_text_config()
        check_full_attention(config)
        text: Any = text_part(model)
        heads, dim = config.num_key_value_heads, text.layers[0].self_attn.head_dim
        shape = (config.num_hidden_layers, 2, num_rows, heads, num_tokens, dim)
        # zeros, not whatever memory held: places beyond a row's length weigh nothing, but nothing times NaN is NaN
        self._kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._filling: Sequence[int] = ()
        self._lengths = torch.zeros(num_rows, dtype=torch.long, device=model.device)
        self._numbers = torch.arange(num_rows, device=model.device)
        self._places = torch.arange(num_tokens, device=model.device)
        self._longest = 0

    def fill(self, rows: Sequence[int]) -> None:
        """Send what the next forward pass computes into these rows, from place 0."""
        self._filling = rows

    def step(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the next forward pass append one token to the first rows, whose lengths these are.

        Returns: positions [n, 1] of the new tokens and the mask [n, 1, 1, T] of what each may see, itself included.
        """
        self._filling = ()
        self._lengths = torch.tensor(lengths, device=self._kv.device)
        self._longest = max(lengths) + 1
        mask = self._places[: self._longest] <= self._lengths[:, None]
        return self._lengths[:, None], mask[:, None, None]

    def move(self, source: int, to: int, num_tokens: int) -> None:
        """Copy a row over one that is free."""
        self._kv[:, :, to, :, :num_tokens] = self._kv[:, :, source, :, :num_tokens]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values [N, heads, new tokens, dim] of one block; give what its attention reads."""
        own = self._kv[layer_idx]
        if self._filling:
            for n, row in enumerate(self._filling):
                own[0, row, :, : keys.shape[2]] = keys[n]
                own[1, row, :, : keys.shape[2]] = values[n]
            return keys, values
        num_rows = len(self._lengths)
        numbers = self._numbers[:num_rows]
        own[0, numbers, :, self._lengths] = keys[:, :, 0]
        own[1, numbers, :, self._lengths] = values[:, :, 0]
        return own[0, :num_rows, :, : self._longest], own[1, :num_rows, :, : self._longest]


def check_full_attention(config: Any) -> None:
    """Raise TargetError for blocks that look back over a window only: rows hold and show every token."""
    kinds = set(config.layer_types) if "layer_types" in config and config.layer_types else {"full_attention"}
    window = config.sliding_window if "sliding_window" in config else None
    if kinds != {"full_attention"} or ("layer_types" not in config and window is not None):
        raise TargetError(
            "a target with full attention in every block",
            f"{', '.join(sorted(kinds))} (sliding_window {window})",
            "answer the prompts in an engine that serves it and give the answers as data",
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with query heads of one key head as rows of one product, so that no key is copied for them."""
    attention = torch.nn.functional.scaled_dot_product_attention
    batch, heads, num_queries, dim = query.shape
    if num_queries > 1:
        out = attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    groups = query.view(batch, key.shape[1], -1, dim)
    mask = None if attention_mask is None else attention_mask.expand(-1, -1, groups.shape[2], -1)
    out = attention(groups, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, 1, heads, dim), None


AttentionInterface.register(ATTENTION, _attend)


@contextmanager
def row_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model attend over rows; its own attention comes back afterwards, so states keep their bits."""
    own = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
