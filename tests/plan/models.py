"""Configurations and inputs that the planner's tests share."""

from pathlib import Path
from typing import Any

import pytest

from headrace.plan.inputs import PlanInputs, make_inputs

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "model_configs"
TAPS = ["1", "16", "31", "46", "61"]

# Qwen3.6-27B, text part, as its published config has it.
QWEN_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_config": {},
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "vocab_size": 248320,
    },
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def published(name: str) -> Path:
    """A published config, or a skip where the shared data is not at hand."""
    path = CONFIGS / name
    if not path.exists():
        pytest.skip(f"shared data absent: {name}")
    return path


def the_data_set(folder: Path, **more: Any) -> PlanInputs:
    """913,786 samples of 800 tokens, 500 of them answers, for Qwen3.6-27B and its published drafter's shape."""
    import json

    path = folder / "config.json"
    path.write_text(json.dumps(QWEN_27B), encoding="utf-8")
    given: dict[str, Any] = {
        "model": str(path),
        "num_samples": 913_786,
        "mean_tokens": 800,
        "mean_answer": 500,
        "taps": TAPS,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    return make_inputs(**{**given, **more})
