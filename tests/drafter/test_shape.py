"""What is derived from a target, and what is refused."""

import dataclasses
import json

import pytest
from transformers import LlamaConfig, Qwen3Config

from headrace.config import DrafterConfig
from headrace.drafter.derive import derive_shape
from headrace.drafter.shape import DrafterShape
from headrace.errors import DrafterError
from tests.drafter.tiny import tiny_shape

TAPS = ("after_block:1",)
ROPE = {"rope_type": "default", "rope_theta": 5e5}


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=ROPE, **changes)


def derive(cfg: DrafterConfig, config: object, **special: list[int]) -> DrafterShape:
    return derive_shape(cfg, config, TAPS, 64, special)


def test_what_is_not_given_is_the_targets() -> None:
    shape = derive(DrafterConfig(mask_token_id=9), llama(intermediate_size=99, rms_norm_eps=1e-3, vocab_size=500))
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 16)
    assert (shape.intermediate_size, shape.rms_norm_eps, shape.vocab_size) == (99, 1e-3, 500)
    assert shape.rope["rope_theta"] == 5e5


def test_a_head_size_that_is_not_the_quotient_is_kept() -> None:
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=ROPE
    )
    assert derive(DrafterConfig(mask_token_id=9), config).head_dim == 32


def test_a_mask_token_is_never_guessed() -> None:
    with pytest.raises(DrafterError, match=r"drafter\.mask_token_id"):
        derive(DrafterConfig(), llama())
    assert derive(DrafterConfig(), llama(), mask=[7]).mask_token_id == 7


@pytest.mark.parametrize("role", ["pad", "eos", "bos"])
def test_a_mask_token_that_means_something_else_is_refused(role: str) -> None:
    with pytest.raises(DrafterError, match=role):
        derive(DrafterConfig(mask_token_id=2), llama(), **{role: [1, 2]})


def test_a_mask_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(DrafterError, match="500"):
        derive(DrafterConfig(mask_token_id=500), llama(vocab_size=500))


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}])
def test_a_missing_rope_is_never_defaulted(rope: dict[str, object] | None) -> None:
    config = llama()
    config.rope_parameters = rope
    with pytest.raises(DrafterError, match="rope_theta"):
        derive(DrafterConfig(mask_token_id=9), config)


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({**ROPE, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({**ROPE, "mrope_section": [1, 2, 3]}, "mrope_section"),
        ({**ROPE, "rope_type": "dynamic"}, "dynamic"),
        ({"rope_type": "default"}, "rope_theta"),
    ],
)
def test_a_rope_that_engines_do_not_give_a_drafter_is_refused_by_name(rope: dict[str, object], name: str) -> None:
    with pytest.raises(DrafterError, match=name):
        dataclasses.replace(tiny_shape(), rope=rope)


def test_the_way_that_sliding_layers_look_is_kept_and_older_checkpoints_look_both_ways() -> None:
    kinds = {"layer_types": ("sliding_attention", "full_attention"), "num_layers": 2, "sliding_window": 6}
    both, causal = (tiny_shape(**kinds, sliding_causal=causal) for causal in (False, True))
    assert "sliding_causal" not in both.to_json()
    assert DrafterShape.from_json(both.to_json()) == both
    assert DrafterShape.from_json(causal.to_json()) == causal
    with pytest.raises(DrafterError, match="sliding_causal"):
        tiny_shape(sliding_causal=True)


def test_a_shape_survives_its_checkpoint() -> None:
    shape = tiny_shape()
    value = json.loads(json.dumps(shape.to_json()))
    assert DrafterShape.from_json(value) == shape
    del value["rope"]
    with pytest.raises(DrafterError, match="rope"):
        DrafterShape.from_json(value)
