"""What is derived from a target, with reasons; what is overridden, and what is refused."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.config import DrafterConfig
from headrace.drafter.derive import Derived, derive
from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.errors import DrafterError
from headrace.testing.tiny_target import FAMILIES, Family, tiny_model

TAPS = ("after_block:1", "after_block:3")
ROPE = {"rope_type": "default", "rope_theta": 5e5}


def llama(**changes: object) -> LlamaConfig:
    own = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE, **changes}
    return LlamaConfig(**own)


def derived(config: object, start: DrafterShape | None = None, **settings: object) -> Derived:
    cfg = DrafterConfig.model_validate({"mask_token_id": 9, **settings} if start is None else settings)
    return derive(cfg, config, TAPS, 128, {}, start)


def test_each_derived_part_has_its_reason_and_each_can_be_overridden() -> None:
    plain = derived(llama())
    named = {reason.partition(" ")[0] for reason in plain.reasons}
    settings = {
        "num_layers": 3,
        "block_size": 6,
        "intermediate_size": 40,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
    }
    assert {f"drafter.{name}" for name in settings} | {"drafter.rope", "drafter.layer_types"} == named
    assert all(": " in reason for reason in plain.reasons)
    given = derived(llama(), **settings)
    assert {name: getattr(given.shape, name) for name in settings} == settings
    assert {reason.partition(" ")[0] for reason in given.reasons} == {"drafter.rope", "drafter.layer_types"}
    window = derived(llama(), num_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    assert window.shape.window(0) == (16, True)
    assert window.shape.window(1) is None
    both = derived(llama(), num_layers=1, layer_types=["sliding_attention"], sliding_window=16, sliding_causal=False)
    assert both.shape.window(0) == (16, False)
    assert not derived(llama()).shape.sliding_causal


def test_depth_and_block_follow_the_targets_size() -> None:
    small, large = derived(llama()).shape, derived(llama(hidden_size=1024, num_attention_heads=8)).shape
    assert (small.num_layers, small.block_size) == (2, 8)
    assert (large.num_layers, large.block_size) == (5, 16)


def test_wide_heads_and_latent_attention_get_heads_of_128() -> None:
    wide = Qwen3Config(
        hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, head_dim=256, rope_parameters=ROPE
    )
    shape = derived(wide).shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    latent = AutoConfig.for_model("deepseek_v3", hidden_size=7168)
    shape = derived(latent).shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)


def test_an_experts_width_is_no_mlps() -> None:
    experts = AutoConfig.for_model("gpt_oss", hidden_size=2880, intermediate_size=2880)
    assert derived(experts).shape.intermediate_size == 3 * 2880
    dense = AutoConfig.for_model("qwen3_moe", hidden_size=64, intermediate_size=192, num_attention_heads=4)
    assert derived(dense).shape.intermediate_size == 192


def test_axes_for_images_and_partial_rotation_are_left_out_with_a_reason() -> None:
    config = AutoConfig.for_model("qwen3_5_text", rope_parameters={
        **ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    })  # fmt: skip
    found = derived(config)
    assert found.shape.rope == ROPE
    reason = next(line for line in found.reasons if line.startswith("drafter.rope"))
    assert "axes" in reason
    assert "whole heads" in reason


def test_of_several_ropes_the_full_attention_blocks_own_is_taken() -> None:
    both = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": ROPE}
    config = AutoConfig.for_model("gemma3_text", rope_parameters=both)
    assert derived(config).shape.rope == both["full_attention"]


def test_scaled_rope_is_numerically_the_targets() -> None:
    kinds = [
        {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {**ROPE, "rope_type": "linear", "factor": 4.0},
        {**ROPE, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 64},
    ]  # fmt: skip
    places = torch.arange(256)
    for rope in kinds:
        config = llama(rope_parameters=rope, max_position_embeddings=256)
        drafter = Drafter(derived(config).shape)
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), places[None])
        ours = drafter._rotation(places)
        torch.testing.assert_close(ours[0][:, 0], cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[1][:, 0], sin[0], rtol=0, atol=1e-6)
        plain = Drafter(derived(llama(max_position_embeddings=256)).shape)
        assert (plain._rotation(places)[0][:, 0] - cos[0]).abs().max() > 0.1


def test_latent_attentions_scale_of_yarn_is_not_an_ordinary_drafters() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
    config = AutoConfig.for_model("deepseek_v3", rope_parameters={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0})
    found = derived(config)
    assert not {"mscale", "mscale_all_dim"} & set(found.shape.rope)
    assert any("mscale" in reason for reason in found.reasons)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_drafter_whose_rope_engines_give(family: Family) -> None:
    shape = derived(tiny_model(family, vocab_size=72).config).shape
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers) == (32, 72, 5)
    assert shape.num_heads % shape.num_kv_heads == 0


def test_the_mask_token_is_the_targets_own_else_an_unused_row() -> None:
    def mask(**special: list[int]) -> int:
        return derive(DrafterConfig(), llama(), TAPS, 128, special).shape.mask_token_id

    assert mask(mask=[7], unused=[9]) == 7
    assert mask(unused=[9]) == 9
    with pytest.raises(DrafterError, match=r"drafter\.mask_token_id"):
        mask()
    with pytest.raises(DrafterError, match="eos"):
        mask(unused=[9], eos=[9])


def test_a_drafter_to_go_on_from_keeps_its_shape() -> None:
    start = derived(llama(), num_layers=3, block_size=5, mask_token_id=11).shape
    found = derived(llama(), start)
    assert found.shape == start
    assert "init_from" in found.reasons[0]


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        ({"vocab_size": 500}, {}, "vocab_size"),
        ({"hidden_size": 128}, {}, "hidden_size"),
        ({"num_hidden_layers": 9}, {}, "num_target_layers"),
        ({}, {"mask_token_id": 12}, r"drafter\.mask_token_id"),
        ({}, {"block_size": 7}, r"drafter\.block_size"),
        ({}, {"num_layers": 1}, r"drafter\.num_layers"),
    ],
)
def test_what_does_not_fit_a_drafter_to_go_on_from_is_named(
    config: dict[str, object], settings: dict[str, object], named: str
) -> None:
    start = derived(llama(), num_layers=3, block_size=5, mask_token_id=11).shape
    with pytest.raises(DrafterError, match=named):
        derived(llama(**config), start, **settings)


def test_other_taps_than_a_drafter_reads_are_named() -> None:
    start = derived(llama()).shape
    with pytest.raises(DrafterError, match=r"target\.taps.*after_block:1"):
        derive(DrafterConfig(), llama(), ("after_block:2", "after_block:3"), 128, {}, start)
