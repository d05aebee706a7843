"""Tiny random targets for tests, saved like any model of transformers, one of each supported family.

In: a folder and a family. Out: the folder with config, safetensors weights and a word-level tokenizer; the same bytes
for the same seed. Answers are noise, but every tensor lies where the real architecture has it.
"""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_BLOCKS = 5
HIDDEN_SIZE = 32
VOCAB_SIZE = 64
EOS_ID = 2
TEMPLATE = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"

Family = Literal[
    "llama", "llama3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma2", "gemma3_text",
    "gemma3", "gemma4_text", "gpt_oss", "deepseek_v3", "glm4", "glm4_moe", "glm_moe_dsa", "minimax_m2",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = {
    **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_ROUTED, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": None,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
}  # fmt: skip
_AXES: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
}  # fmt: skip
_WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_WINDOW["layer_types"] = [*_WINDOW["layer_types"], "sliding_attention"]
_GEMMA: dict[str, Any] = {**_WINDOW, "query_pre_attn_scalar": 8}
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Of each family its model type (of the text part), and what makes it one of its kind.
# A tiny indexer scores many tokens 0, and which of them it keeps depends on the length: it keeps all.
_KINDS: dict[Family, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4}),
    "qwen3_5": ("qwen3_5_text", {**_HYBRID, **_AXES}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_HYBRID, **_AXES, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_HYBRID, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5},
    ),
    "gemma2": ("gemma2", {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}),
    "gemma3_text": ("gemma3_text", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "gemma4_text": (
        "gemma4_text",
        {
            **_WINDOW, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "global_head_dim": 8,
            "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {**_YARN, "truncate": False}},
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "partial_rotary_factor": 0.5}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 64}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
# transformers reads their tokenizers by classes of their own, which keep added tokens and split all else into bytes.
_OWN_TOKENIZER = ("qwen2", "qwen3_5", "qwen3_5_moe")
# The towers of the families that are saved as multimodal models are; text never enters them.
_TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN_SIZE,
    "patch_size": 4, "num_position_embeddings": 16,
}  # fmt: skip
_GEMMA_TOWER: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {"qwen3_5": _TOWER, "qwen3_5_moe": _TOWER, "gemma3": _GEMMA_TOWER}


def save_tiny_target(
    folder: Path,
    kind: Family = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Save a random target of 5 blocks, hidden 32, vocabulary 64, 4 heads on 2 key heads.

    Args:
        max_shard_size: as in save_pretrained; "20KB" makes a sharded folder with an index.
        changes: further fields of the config.
    """
    model = tiny_model(kind, tied=tied, seed=seed, **changes)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0, bos_token_id=1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = tiny_tokenizer()
    if kind in _OWN_TOKENIZER:
        tokenizer.add_tokens([AddedToken(f"w{n}", lstrip=True, normalized=False) for n in range(3, VOCAB_SIZE)])
    tokenizer.save_pretrained(folder)
    return folder


def tiny_model(kind: Family = "llama", *, tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model alone, in float32 and evaluation mode; no random state outside is touched.

    Every vector is random too: a norm whose weights are all one would hide that they were read wrongly.
    """
    model_type, own = _KINDS[kind]
    shape: dict[str, Any] = {
        "num_hidden_layers": NUM_BLOCKS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "vocab_size": VOCAB_SIZE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,  # wide enough for answers that differ
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        **own,
        **changes,
    }
    config = AutoConfig.for_model(model_type, **{key: value for key, value in shape.items() if value is not None})
    auto = AutoModelForCausalLM
    if kind in _VISION:
        both = {"text_config": config.to_dict(), "vision_config": _VISION[kind], "tie_word_embeddings": tied}
        config, auto = AutoConfig.for_model(kind, **both), AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
        if kind not in ("llama", "qwen3"):  # their bytes are those of earlier releases
            _spread(model)
    return model.eval()


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Random norms, and a row for the padding token, which stands for unknown words too."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.add_(torch.rand_like(parameter) * 0.5)
    table: torch.Tensor = model.get_input_embeddings().weight
    table[0].uniform_(-0.5, 0.5)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 to w63 and three special tokens, one id each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
