"""What a drafter's blocks attend to, in two forms that compute the same: plain products, and flex_attention.

In: queries, keys and values of packed blocks, the keys and values of their samples' contexts, and which block belongs
where. Out: the mixed values. A slot sees, of its own sample, tokens strictly before its block's anchor, and its own
block; with a window, of these only what lies less than so many tokens away, or, where it is causal, also nothing later
than itself. The plain form works sample by sample and suits CPUs and decoding; on CUDA, training packs all samples of a
group into one kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headrace.drafter.shape import Window

KeysValues = tuple[torch.Tensor, torch.Tensor]
# Below so many slots, as in decoding, one kernel over a mask costs more than it saves.
_FLEX_SLOTS = 128


@dataclass(eq=False)
class Packing:
    """Which blocks belong to which sample: for each, the places of its anchors int64 [A] and its context's tokens T.

    Block masks are made once for all layers that share a window.
    """

    anchors: Sequence[torch.Tensor]
    context_tokens: Sequence[int]
    block_size: int
    _masks: dict[Window | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: Window | None) -> BlockMask:
        """What each slot sees of [all contexts, all blocks], for flex_attention."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: Window | None) -> BlockMask:
        anchors_N = torch.cat(list(self.anchors))
        device, size, num_context = anchors_N.device, self.block_size, sum(self.context_tokens)
        sample_N = _repeat(range(len(self.anchors)), [len(at) for at in self.anchors], device)
        # A last row stands for keys that are no context, whose index is cut off there.
        sample_T = torch.cat(
            (_repeat(range(len(self.anchors)), self.context_tokens, device), sample_N.new_tensor([-1]))
        )
        places = [torch.arange(n, device=device) for n in self.context_tokens]
        place_T = torch.cat((*places, sample_N.new_tensor([0])))

        def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            block, slot = query // size, query % size
            token, own = key.clamp(max=num_context), (key - num_context).clamp(min=0)
            known = (sample_T[token] == sample_N[block]) & (place_T[token] < anchors_N[block])
            same = (key >= num_context) & (own // size == block)
            if window is not None:
                known = known & (anchors_N[block] + slot - place_T[token] < window.size)
                same = same & _within(slot, own % size, window)
            return known | same

        num_slots = len(anchors_N) * size
        return create_block_mask(sees, None, None, num_slots, num_context + num_slots, device=str(device))


def _repeat(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(list(values), device=device), torch.tensor(list(counts), device=device))


def attend(
    queries: torch.Tensor,
    own: KeysValues,
    contexts: Sequence[KeysValues],
    packing: Packing,
    window: Window | None,
) -> torch.Tensor:
    """Mix values for packed blocks.

    Args:
        queries: [N, B, heads, D]; the blocks of each sample in turn.
        own: keys and values of the blocks, [N, B, KV, D] each.
        contexts: for each sample, keys and values [T, KV, D].
        window: of the layer; None for everything.
    Returns: [N, B, heads * D].
    """
    packed = queries.is_cuda and torch.is_grad_enabled() and queries.shape[0] * queries.shape[1] >= _FLEX_SLOTS
    form = attend_flex if packed else attend_plain
    return form(queries, own, contexts, packing, window)


def attend_flex(
    queries: torch.Tensor, own: KeysValues, contexts: Sequence[KeysValues], packing: Packing, window: Window | None
) -> torch.Tensor:
    """`attend` as one kernel over all samples; without gradients it runs on CPUs too, uncompiled, for tests."""
    num_blocks, block_size, num_heads, dim = queries.shape
    keys, values = (
        torch.cat((*(context[i] for context in contexts), own[i].flatten(0, 1))).transpose(0, 1)[None] for i in (0, 1)
    )
    flat = queries.flatten(0, 1).transpose(0, 1)[None]
    mixed: torch.Tensor = _kernel(queries.is_cuda)(flat, keys, values, block_mask=packing.mask(window), enable_gqa=True)
    return mixed[0].transpose(0, 1).reshape(num_blocks, block_size, num_heads * dim)


@cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    """Steps differ in tokens and blocks, so shapes are symbols."""
    kernel: Any = flex_attention
    return torch.compile(kernel, dynamic=True) if compiled else kernel


def attend_plain(
    queries: torch.Tensor, own: KeysValues, contexts: Sequence[KeysValues], packing: Packing, window: Window | None
) -> torch.Tensor:
    """`attend` sample by sample: a context differs in length from sample to sample."""
    counts = [len(at) for at in packing.anchors]
    keys, values = own
    parts = zip(
        torch.split(queries, counts),
        torch.split(keys, counts),
        torch.split(values, counts),
        contexts,
        packing.anchors,
        strict=True,
    )
    return torch.cat([_one_sample(q, (k, v), context, at, window) for q, k, v, context, at in parts if len(at)])


def _one_sample(
    queries: torch.Tensor, own: KeysValues, context: KeysValues, anchors_A: torch.Tensor, window: Window | None
) -> torch.Tensor:
    """Blocks of one sample: queries [A, B, heads, D], own keys [A, B, KV, D], context keys [T, KV, D]."""
    (keys, values), (context_keys, context_values) = own, context
    num_anchors, block_size, _, dim = queries.shape
    num_tokens, num_kv, _ = context_keys.shape
    grouped = queries.view(num_anchors, block_size, num_kv, -1, dim).permute(2, 0, 1, 3, 4)
    flat = grouped.reshape(num_kv, -1, dim)  # each key head meets the queries of its group, slot by slot
    by_block = flat.view(num_kv, num_anchors, -1, dim)
    rows = by_block.shape[2]
    to_context = torch.matmul(flat, context_keys.permute(1, 2, 0)).view(num_kv, num_anchors, rows, num_tokens)
    to_context = to_context.masked_fill(_by_head(_unseen(anchors_A, block_size, num_tokens, window), rows), -torch.inf)
    to_block = torch.matmul(by_block, keys.permute(2, 0, 3, 1))
    if window is not None and (window.causal or window.size < block_size):
        slots = torch.arange(block_size, device=anchors_A.device)
        unseen = ~_within(slots[:, None], slots, window)
        to_block = to_block.masked_fill(_by_head(unseen[None], rows), -torch.inf)
    scores = torch.cat((to_context, to_block), dim=-1).float() * dim**-0.5
    shares = torch.softmax(scores, dim=-1).to(values.dtype)
    mixed = torch.matmul(shares[..., num_tokens:], values.permute(2, 0, 1, 3))
    if num_tokens:
        to_values = shares[..., :num_tokens].reshape(num_kv, -1, num_tokens)
        mixed = mixed + torch.matmul(to_values, context_values.transpose(0, 1)).view_as(mixed)
    back = mixed.view(num_kv, num_anchors, block_size, -1, dim).permute(1, 2, 0, 3, 4)
    return back.reshape(num_anchors, block_size, -1)


def _within(slot: torch.Tensor, other: torch.Tensor, window: Window) -> torch.Tensor:
    """Whether a slot sees another one of its block."""
    back = slot - other
    return (back >= 0) & (back < window.size) if window.causal else back.abs() < window.size


def _unseen(anchors_A: torch.Tensor, block_size: int, num_tokens: int, window: Window | None) -> torch.Tensor:
    """Context tokens that a slot must not see, [A, 1 or B, T]: from the anchor on, and those beyond its window.

    The window is counted from each slot, as a decoder's attention counts it, not from the block's anchor.
    """
    tokens = torch.arange(num_tokens, device=anchors_A.device)
    unseen = tokens >= anchors_A[:, None, None]
    if window is None:
        return unseen
    slots_AB1 = (anchors_A[:, None] + torch.arange(block_size, device=anchors_A.device))[..., None]
    return unseen | (slots_AB1 - tokens >= window.size)


def _by_head(mask_ABT: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat a mask [A, B, T] for the heads of a slot, which lie together: [A, rows, T]; one of [A, 1, T] as it is."""
    size = mask_ABT.shape[1]
    return mask_ABT if size == 1 else mask_ABT.repeat_interleave(rows // size, dim=1)
