"""One block of a target: its parameters, and what it remembers of a token.

In: the text part of a `config.json` and a block's number. Out: parameters in all and at work for one token, elements
of KV cache a token, elements of recurrent state a sequence. Biases and the norms inside heads (together under 0.1 %)
are left out. The mixer is told by the keys a layout has; the family decides only which layouts are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import PlanError


class Fields:
    """A configuration's keys; one that is needed and missing is an error that names it."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def need(self, *keys: str) -> int:
        """The first of these keys that holds a whole number. Raises: PlanError naming all of them."""
        for key in keys:
            found = self.values.get(key)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
            if found is not None:
                raise PlanError(f"a whole number as {key} of {self.name}", repr(found), "mend the config.json")
        raise PlanError(
            f"{' or '.join(keys)} in the configuration of {self.name}",
            f"keys {', '.join(sorted(self.values))}",
            "use the model's full config.json, or give --hidden-size, --blocks and --params instead",
        )

    def maybe(self, *keys: str) -> int | None:
        """The first of these keys that is given and not null."""
        return next((self.need(key) for key in keys if self.values.get(key) is not None), None)

    def at(self, key: str, index: int) -> Any:
        """Entry `index` of a list by block; None where there is no such list."""
        values = self.values.get(key)
        return values[index] if isinstance(values, list) and index < len(values) else None


@dataclass(frozen=True)
class Mixer:
    """What mixes tokens in one block: attention of some kind, or a linear recurrence.

    `pair_flops` are floating-point operations for each (token, earlier token) pair; `window` bounds the pairs.
    """

    kind: str
    params: int
    kv_elements: int
    state_elements: int = 0
    pair_flops: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of one block: parameters in all, and at work for one token."""

    params: int
    active: int


def mixer(fields: Fields, index: int) -> Mixer:
    """Count the mixer of block `index`."""
    linear = fields.values.get("linear_attn_config")
    if fields.at("layer_types", index) == "linear_attention":
        return _gated_delta_net(fields)
    if isinstance(linear, Mapping) and index + 1 in linear.get("kda_layers", ()):
        return _kimi_delta(fields.need("hidden_size"), Fields(linear, f"{fields.name} linear_attn_config"))
    if fields.values.get("model_type") == "deepseek_v4":
        return _shared_kv(fields, index)
    if fields.values.get("kv_lora_rank") is not None:
        return _latent(fields)
    return _grouped(fields, index)


def _grouped(fields: Fields, index: int) -> Mixer:
    """Multi-head attention with grouped keys and values (Llama, Qwen, Gemma, gpt-oss, MiMo)."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    kv_heads = fields.maybe("num_key_value_heads") or heads
    head_dim = fields.maybe("head_dim") or hidden // heads
    value_dim = fields.maybe("v_head_dim") or head_dim
    kind = fields.at("layer_types", index)
    full = kind == "full_attention"
    shared_values = 2
    if fields.at("hybrid_layer_pattern", index) == 1:
        heads, kv_heads = fields.need("swa_num_attention_heads"), fields.need("swa_num_key_value_heads")
        head_dim, value_dim = fields.need("swa_head_dim"), fields.need("swa_v_head_dim")
    elif full and fields.maybe("global_head_dim"):
        head_dim = value_dim = fields.need("global_head_dim")
        kv_heads = fields.maybe("num_global_key_value_heads") or kv_heads
        shared_values = 1 if fields.values.get("attention_k_eq_v") is True else 2
    gate = 2 if fields.values.get("attn_output_gate") is True else 1
    keys, values = kv_heads * head_dim, kv_heads * value_dim
    projections = heads * head_dim * gate + keys + (values if shared_values == 2 else 0) + heads * value_dim
    sliding = _slides(fields, index)
    return Mixer(
        kind="sliding" if sliding else "full",
        params=hidden * projections,
        kv_elements=keys + values,
        pair_flops=2 * heads * (head_dim + value_dim),
        window=fields.need("sliding_window", "sliding_window_size") if sliding else None,
    )


def _slides(fields: Fields, index: int) -> bool:
    if fields.values.get("use_sliding_window") is False or fields.maybe("sliding_window") is None:
        return False
    kind = fields.at("layer_types", index)
    if kind is not None:
        return bool(kind == "sliding_attention")
    pattern = fields.at("hybrid_layer_pattern", index)
    if pattern is not None:
        return bool(pattern == 1)
    family = fields.values.get("model_type")
    every = fields.maybe("sliding_window_pattern", "_sliding_window_pattern")
    if every is None:
        every = {"gemma2": 2, "gemma3_text": 6}.get(str(family))
    return every is not None and (index + 1) % every != 0


def _latent(fields: Fields) -> Mixer:
    """Multi-head latent attention (DeepSeek, Kimi, GLM), with the indexer of the sparse ones."""
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    rank, rope = fields.need("kv_lora_rank"), fields.need("qk_rope_head_dim")
    nope, value = fields.need("qk_nope_head_dim"), fields.need("v_head_dim")
    query_rank = fields.maybe("q_lora_rank")
    width = heads * (nope + rope)
    query = hidden * width if query_rank is None else query_rank * (hidden + width)
    params = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    kv, pair_flops = rank + rope, 2 * heads * (nope + rope + value)
    if fields.values.get("mla_use_output_gate") is True:
        params += hidden * heads * value
    index_heads = fields.maybe("index_n_heads")
    if index_heads is None:
        return Mixer("latent", params, kv, pair_flops=pair_flops)
    index_dim = fields.need("index_head_dim")
    params += (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
    return Mixer("sparse latent", params, kv + index_dim, pair_flops=pair_flops, window=fields.need("index_topk"))


def _shared_kv(fields: Fields, index: int) -> Mixer:
    """DeepSeek V4: one key that is also the value, low-rank queries, grouped outputs, keys mostly compressed."""
    hidden, heads, head_dim = (fields.need(k) for k in ("hidden_size", "num_attention_heads", "head_dim"))
    query_rank, out_rank, groups = (fields.need(k) for k in ("q_lora_rank", "o_lora_rank", "o_groups"))
    ratio = int(fields.at("compress_ratios", index) or 0)
    params = query_rank * (hidden + heads * head_dim) + hidden * head_dim
    params += out_rank * heads * head_dim + groups * out_rank * hidden
    window = fields.need("sliding_window")
    if ratio:
        params += 2 * hidden * head_dim * (2 if ratio == 4 else 1)
    kv = head_dim // ratio if ratio else 0
    return Mixer("compressed", params, kv, window * head_dim, 4 * heads * head_dim, window)


def _gated_delta_net(fields: Fields) -> Mixer:
    """Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5; float32 state."""
    hidden = fields.need("hidden_size")
    key_dim, value_dim = fields.need("linear_key_head_dim"), fields.need("linear_value_head_dim")
    key_heads, value_heads = fields.need("linear_num_key_heads"), fields.need("linear_num_value_heads")
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    params = hidden * (mixed + value_heads * value_dim + 2 * value_heads) + value_heads * value_dim * hidden
    params += mixed * fields.need("linear_conv_kernel_dim")
    return Mixer("linear", params, 0, value_heads * key_dim * value_dim + mixed * 4)


def _kimi_delta(hidden: int, linear: Fields) -> Mixer:
    """Kimi Delta Attention; its gates go through the head dimension."""
    heads, head_dim = linear.need("num_heads"), linear.need("head_dim")
    width = heads * head_dim
    params = 4 * hidden * width + 2 * (hidden * head_dim + head_dim * width) + hidden * heads
    return Mixer("linear", params, 0, heads * head_dim * head_dim + 3 * width * 4)


def mlp(fields: Fields, index: int) -> Mlp:
    """Count the feed-forward part of block `index`; every one of them is gated (three matrices)."""
    hidden = fields.need("hidden_size")
    experts = fields.maybe("num_experts", "n_routed_experts", "num_local_experts")
    if fields.values.get("model_type") == "gemma4_text":  # its blocks have a dense part beside the experts
        dense = 3 * hidden * fields.need("intermediate_size")
        routed = _experts(fields, experts) if fields.values.get("enable_moe_block") is True and experts else Mlp(0, 0)
        return Mlp(dense + routed.params, dense + routed.active)
    if experts and _is_sparse(fields, index):
        return _experts(fields, experts)
    dense = 3 * hidden * fields.need("intermediate_size_mlp", "intermediate_size")
    return Mlp(dense, dense)


def _is_sparse(fields: Fields, index: int) -> bool:
    named = fields.at("mlp_layer_types", index)
    if named is not None:
        return bool(named == "sparse")
    frequency = fields.at("moe_layer_freq", index)
    if frequency is not None:
        return bool(frequency == 1)
    if index in (fields.values.get("mlp_only_layers") or ()):
        return False
    step = fields.maybe("decoder_sparse_step", "interleave_moe_layer_step") or 1
    return index >= (fields.maybe("first_k_dense_replace") or 0) and (index + 1) % step == 0


def _experts(fields: Fields, num_experts: int) -> Mlp:
    hidden = fields.need("hidden_size")
    width = fields.need("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    chosen = fields.need("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    latent = fields.maybe("routed_expert_hidden_size")
    expert = 3 * (latent or hidden) * width
    always = hidden * num_experts + (2 * hidden * latent if latent else 0)
    always += 3 * hidden * _shared_width(fields, width)
    return Mlp(always + num_experts * expert, always + chosen * expert)


def _shared_width(fields: Fields, width: int) -> int:
    direct = fields.maybe("shared_expert_intermediate_size")
    if direct is not None:
        return direct
    if fields.values.get("model_type") == "llama4_text":
        return width
    return width * (fields.maybe("n_shared_experts", "num_shared_experts") or 0)
