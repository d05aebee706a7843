"""The drafter: a block-parallel decoder that reads the target through its features (DFlash, arXiv 2602.06036).

In: features of a sample's tokens, and anchors. Out: hidden states of whole blocks, for the target's own head.
A block is the anchor's token followed by mask tokens; its slots see each other in both directions, and of the sample
only tokens strictly before the anchor, whose states exist when the block is drafted. Blocks never see each other.
Training, teacher-forced evaluation and decoding all run the same `blocks`; they differ in how contexts are made.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from headrace.drafter.attend import KeysValues, Packing, attend
from headrace.drafter.shape import DrafterShape, Window
from headrace.errors import DrafterError

# Qwen3's initializer_range.
_INIT_STD = 0.02
# Up to so many rows, float32 products with the head on a CPU are up to four times faster the other way around.
_FEW_ROWS = 16


class Head(Protocol):
    """The target's frozen ends: what `target.head.FrozenHead` offers, and all a drafter needs of its target."""

    @property
    def embedding_VH(self) -> torch.Tensor:
        """Rows that ids become."""
        ...

    @property
    def head_VH(self) -> torch.Tensor:
        """Rows that hidden states are multiplied with; their dtype is the product's."""
        ...

    @property
    def embedding_scale(self) -> float:
        """Multiplies embeddings."""
        ...

    @property
    def logit_scale(self) -> float:
        """Multiplies logits."""
        ...

    @property
    def softcap(self) -> float | None:
        """c of c * tanh(logits / c), applied last; None for none."""
        ...


def head_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Logits [..., V] of hidden states [..., H]: multiplied in the head's dtype, scaled and capped in float32."""
    # As one matrix: torch multiplies a strided [..., H] batch by batch, and reads the whole head for each.
    rows = hidden.reshape(-1, hidden.shape[-1]).to(head.head_VH.dtype)
    few = len(rows) <= _FEW_ROWS and rows.device.type == "cpu" and rows.dtype == torch.float32
    product = (head.head_VH @ rows.T).T if few else F.linear(rows, head.head_VH)
    logits = product.float().view(*hidden.shape[:-1], -1)
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


@dataclass(frozen=True, eq=False)
class Context:
    """Keys and values of a sample's tokens 0 to num_tokens - 1, one [T, KV, D] each a layer.

    T is num_tokens, or 0 for a drafter that sees no features.
    """

    num_tokens: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def cut(self) -> "Context":
        """The same numbers outside the graph, collecting gradients of their own."""
        parts = ([t.detach().requires_grad_(t.requires_grad) for t in own] for own in (self.keys, self.values))
        return Context(self.num_tokens, *map(tuple, parts))

    def gradients(self, cut: "Context") -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of this context with the gradient that its `cut` collected, for those that did."""
        pairs = zip((*self.keys, *self.values), (*cut.keys, *cut.values), strict=True)
        return [(whole, part.grad) for whole, part in pairs if part.grad is not None]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Mlp(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


Rotation = tuple[torch.Tensor, torch.Tensor]


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn [..., heads, D] by cosines and sines [..., 1, D], in float32."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Attention of blocks to their sample's context and to themselves; grouped query heads, as Qwen3's."""

    def __init__(self, shape: DrafterShape, window: Window | None) -> None:
        """Args: window: what the layer sees; None for everything."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.window = window
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> KeysValues:
        """Keys (normed, turned) and values of [..., H]: two [..., KV, D]."""
        wanted = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        return _rotate(self.k_norm(self.k_proj(x).view(wanted)), rotation), self.v_proj(x).view(wanted)

    def forward(
        self, x_NBH: torch.Tensor, rotation: Rotation, contexts: Sequence[KeysValues], packing: Packing
    ) -> torch.Tensor:
        """Attend packed blocks [N, B, H], the blocks of each sample in turn."""
        num_blocks, block_size, _ = x_NBH.shape
        queries = self.q_norm(self.q_proj(x_NBH).view(num_blocks, block_size, self.num_heads, self.head_dim))
        mixed = attend(_rotate(queries, rotation), self.keys_values(x_NBH, rotation), contexts, packing, self.window)
        out: torch.Tensor = self.o_proj(mixed)
        return out


class Layer(nn.Module):
    """One decoder layer, as Qwen3's."""

    def __init__(self, shape: DrafterShape, window: Window | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, window)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x_NBH: torch.Tensor, rotation: Rotation, contexts: Sequence[KeysValues], packing: Packing
    ) -> torch.Tensor:
        """[N, B, H] to [N, B, H]."""
        x_NBH = x_NBH + self.self_attn(self.input_layernorm(x_NBH), rotation, contexts, packing)
        out: torch.Tensor = x_NBH + self.mlp(self.post_attention_layernorm(x_NBH))
        return out


class Drafter(nn.Module):
    """The drafter; parameters are named as z-lab's, so that export renames nothing.

    `feature_scale` float32 [F], a buffer, is one over the RMS of the tap each feature belongs to; it multiplies the
    features before `fc` and is folded into it at export. `d2t`, a buffer too, is the mapping of a reduced vocabulary
    (drafter/draft_vocabulary.py), None for the whole one.
    """

    feature_scale: torch.Tensor
    d2t: torch.Tensor | None

    def __init__(self, shape: DrafterShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_features, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, shape.window(i)) for i in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("feature_scale", torch.ones(shape.num_features))
        size = shape.draft_vocab_size
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.int64))
        # Inside a tuple, or `.to(torch.bfloat16)` on the drafter would round its frequencies.
        self._rotary = (Qwen3RotaryEmbedding(_rotary_config(shape)),)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every matrix from a generator seeded by its own name, so that arms of a comparison pair by name."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _INIT_STD)

    def forward(
        self,
        features: Sequence[torch.Tensor],
        anchors: Sequence[torch.Tensor],
        input_ids: Sequence[torch.Tensor],
        head: Head,
    ) -> torch.Tensor:
        """Run the blocks of a micro-batch, for training.

        Args:
            features: for each sample, [T, F], token 0 first.
            anchors: for each sample, int64 [A], places of its anchors; A may differ, and may be 0.
            input_ids: for each sample, int64 [T].
        Returns: hidden states [sum of A, B, H], samples in order, anchors in order; the head is yet to be applied.
        """
        anchor_ids = [ids[at] for ids, at in zip(input_ids, anchors, strict=True)]
        return self.blocks(self.contexts(features), anchors, anchor_ids, head)

    def contexts(self, features: Sequence[torch.Tensor]) -> list[Context]:
        """Keys and values of whole samples, computed together. Args: features: for each sample, [T, F]."""
        lengths = [len(f) for f in features]
        places = [torch.arange(n, device=self.feature_scale.device) for n in lengths]
        pairs = self._keys_values(torch.cat(list(features)), torch.cat(places))
        if not self.shape.features:
            return [Context(n, *zip(*pairs, strict=True)) for n in lengths]
        split = [(torch.split(k, lengths), torch.split(v, lengths)) for k, v in pairs]
        return [Context(n, tuple(k[i] for k, _ in split), tuple(v[i] for _, v in split)) for i, n in enumerate(lengths)]

    def empty_context(self) -> Context:
        """A context of no tokens, to be extended while decoding."""
        return self.contexts([self.feature_scale.new_zeros(0, self.shape.num_features)])[0]

    def extend_context(self, context: Context, features_TF: torch.Tensor, start: int) -> Context:
        """Add the features of tokens start to start + T - 1; what the context held from `start` on is replaced.

        Returns: a new context of start + T tokens. Raises: DrafterError if tokens before `start` are missing.
        """
        if start > context.num_tokens:
            raise DrafterError(
                f"features from token {context.num_tokens} on",
                f"features from token {start} on",
                "extend the context token by token, without gaps",
            )
        places = torch.arange(start, start + len(features_TF), device=self.feature_scale.device)
        fresh = self._keys_values(features_TF, places)
        keep = start if self.shape.features else 0
        old = zip(context.keys, context.values, strict=True)
        pairs = [
            (torch.cat((k[:keep], new_k)), torch.cat((v[:keep], new_v)))
            for (k, v), (new_k, new_v) in zip(old, fresh, strict=True)
        ]
        return Context(start + len(features_TF), *zip(*pairs, strict=True))

    def blocks(
        self,
        contexts: Sequence[Context],
        anchors: Sequence[torch.Tensor],
        anchor_ids: Sequence[torch.Tensor],
        head: Head,
    ) -> torch.Tensor:
        """Run blocks against contexts that exist.

        Args:
            anchors: for each context, int64 [A]: places of its anchors, at most its number of tokens.
            anchor_ids: for each context, int64 [A]: the tokens there.
        Returns: hidden states [sum of A, B, H], normed; slot 0, the anchor's, predicts nothing.
        Raises: DrafterError for an anchor whose earlier tokens the context does not hold, and for no anchor at all.
        """
        places_N = torch.cat(list(anchors))
        if not len(places_N):
            raise DrafterError("at least one anchor", "none", "leave out samples without anchors")
        for context, at in zip(contexts, anchors, strict=True):
            if len(at) and int(at.max()) > context.num_tokens:
                raise DrafterError(
                    f"states of every token before anchor {int(at.max())}",
                    f"{context.num_tokens} tokens",
                    "extend the context first",
                )
        slots = torch.arange(self.shape.block_size, device=places_N.device)
        rotation = self._rotation(places_N[:, None] + slots)
        x_NBH = self._slot_embeddings(torch.cat(list(anchor_ids)), head)
        packing = Packing(anchors, [c.keys[0].shape[0] for c in contexts], self.shape.block_size)
        for i, layer in enumerate(self.layers):
            x_NBH = layer(x_NBH, rotation, [(c.keys[i], c.values[i]) for c in contexts], packing)
        out: torch.Tensor = self.norm(x_NBH)
        return out

    def draft(self, context: Context, anchor_id: int, anchor: int, head: Head) -> torch.Tensor:
        """Draft one block for decoding: hidden states [B - 1, H] of the slots after the anchor."""
        device = self.feature_scale.device
        places, ids = torch.tensor([anchor], device=device), torch.tensor([anchor_id], device=device)
        return self.blocks([context], [places], [ids], head)[0, 1:]

    def _slot_embeddings(self, anchor_ids_N: torch.Tensor, head: Head) -> torch.Tensor:
        """The anchor's embedding, then the mask token's: [N, B, H] in the drafter's dtype."""
        ids = anchor_ids_N.new_full((len(anchor_ids_N), self.shape.block_size), self.shape.mask_token_id)
        ids[:, 0] = anchor_ids_N
        embedded = F.embedding(ids, head.embedding_VH).to(self.norm.weight.dtype)
        return embedded if head.embedding_scale == 1.0 else embedded * head.embedding_scale

    def _keys_values(
        self, features_TF: torch.Tensor, places_T: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values of tokens at `places_T`; without features none, [0, KV, D]."""
        if not self.shape.features:
            none = self.norm.weight.new_zeros(0, self.shape.num_kv_heads, self.shape.head_dim)
            return [(none, none)] * len(self.layers)
        scaled = (features_TF.to(self.feature_scale.device).float() * self.feature_scale).to(self.fc.weight.dtype)
        context_TH = self.hidden_norm(self.fc(scaled))
        rotation = self._rotation(places_T)
        return [layer.self_attn.keys_values(context_TH, rotation) for layer in self.layers]  # type: ignore[union-attr, operator]

    def _rotation(self, places: torch.Tensor) -> Rotation:
        """Cosines and sines [..., 1, D] in float32, one for all heads."""
        cos, sin = self._rotary[0](self.feature_scale.new_zeros(0, dtype=torch.float32), places.reshape(1, -1))
        shape = (*places.shape, 1, self.shape.head_dim)
        return cos.view(shape), sin.view(shape)


def _rotary_config(shape: DrafterShape) -> Qwen3Config:
    """What transformers' rotary embedding reads, scaled kinds included."""
    return Qwen3Config(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope),
    )
