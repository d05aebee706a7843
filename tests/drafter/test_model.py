"""What a block may see, and that every path computes the same."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from headrace.drafter.model import Drafter, head_logits
from headrace.errors import DrafterError
from tests.drafter.tiny import BLOCK, FEATURES, HIDDEN, MASK, ids_of, tiny_drafter, tiny_head, tiny_sample, tiny_shape

ANCHORS = torch.tensor([6, 8, 9, 15])


@torch.no_grad()
def blocks(drafter: Drafter, features: torch.Tensor, anchors: torch.Tensor = ANCHORS, seed: int = 0) -> torch.Tensor:
    sample, _ = tiny_sample(seed=seed)
    return drafter([features], [anchors], [ids_of(sample)], tiny_head())


@pytest.mark.parametrize("place", range(20))
def test_a_state_at_or_after_an_anchor_changes_nothing_and_one_before_it_does(place: int) -> None:
    drafter, (_, features) = tiny_drafter(), tiny_sample()
    moved = features.clone()
    moved[place] += 1.0
    before, after = blocks(drafter, features), blocks(drafter, moved)
    for block, anchor in enumerate(ANCHORS.tolist()):
        if place >= anchor:
            assert torch.equal(before[block], after[block]), f"the block at {anchor} saw token {place}"
        else:
            assert (before[block] - after[block]).abs().max() > 1e-4, f"the block at {anchor} missed token {place}"


@pytest.mark.parametrize("window", [1, 3, 5, 9, 100])
def test_a_slot_sees_what_lies_less_than_its_window_away(window: int) -> None:
    shape = tiny_shape(layer_types=("sliding_attention",), num_layers=1, sliding_window=window)
    drafter, (_, features) = Drafter(shape, seed=1), tiny_sample()
    before = blocks(drafter, features)
    for place in range(20):
        moved = features.clone()
        moved[place] += 1.0
        after = blocks(drafter, moved)
        for block, anchor in enumerate(ANCHORS.tolist()):
            for slot in range(BLOCK):
                seen = place < anchor and anchor + slot - place < window
                changed = bool((before[block, slot] - after[block, slot]).abs().max() > 1e-6)
                assert changed == seen, f"slot {slot} of the block at {anchor}, token {place}"


@pytest.mark.parametrize("window", [1, 2, 100])
def test_a_slot_of_a_causal_sliding_layer_sees_nothing_later_in_its_block(window: int) -> None:
    sizes = {"layer_types": ("sliding_attention",), "num_layers": 1, "sliding_window": window}
    (sample, features), head = tiny_sample(), tiny_head()
    anchor = int(ANCHORS[1])
    moved = dataclasses.replace(head, embedding_VH=head.embedding_VH.clone())
    moved.embedding_VH[int(sample.input_ids[anchor])] += 1.0  # the first slot of that block
    masked = dataclasses.replace(head, embedding_VH=head.embedding_VH.clone())
    masked.embedding_VH[tiny_shape().mask_token_id] += 1.0  # all slots but the first
    for causal in (False, True):
        drafter = Drafter(tiny_shape(**sizes, sliding_causal=causal), seed=1)
        words = torch.from_numpy(sample.input_ids.astype("int64"))
        before, first, others = (
            drafter([features], [torch.tensor([anchor])], [words], own)[0] for own in (head, moved, masked)
        )
        seen = [bool((before[slot] - first[slot]).abs().max() > 1e-6) for slot in range(1, BLOCK)]
        assert seen == [slot < window for slot in range(1, BLOCK)]
        first_sees_later = bool((before[0] - others[0]).abs().max() > 1e-6)
        assert first_sees_later == (not causal and window > 1)


def test_mixed_layers_look_back_each_by_its_own_type() -> None:
    kinds = ("sliding_attention", "full_attention")
    mixed = Drafter(tiny_shape(layer_types=kinds, sliding_window=2), seed=1)
    full = Drafter(tiny_shape(), seed=1)
    _, features = tiny_sample()
    moved = features.clone()
    moved[0] += 1.0
    assert (blocks(mixed, features) - blocks(full, features)).abs().max() > 1e-4
    assert (blocks(mixed, features) - blocks(mixed, moved)).abs().max() > 1e-5


def test_blocks_do_not_see_each_other() -> None:
    drafter, (_, features) = tiny_drafter(), tiny_sample()
    together = blocks(drafter, features)
    for block, anchor in enumerate(ANCHORS):
        torch.testing.assert_close(together[block], blocks(drafter, features, anchor[None])[0], atol=1e-5, rtol=1e-5)


def test_slots_of_a_block_see_each_other_in_both_directions() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample()
    head = tiny_head()
    moved = dataclasses.replace(head, embedding_VH=head.embedding_VH.clone())
    moved.embedding_VH[int(sample.input_ids[6])] += 1.0
    with torch.no_grad():
        before, after = (drafter([features], [ANCHORS[:1]], [ids_of(sample)], h) for h in (head, moved))
    assert ((before - after).abs().amax(-1) > 1e-5).all()


def test_packed_samples_do_not_see_each_other() -> None:
    drafter, head = tiny_drafter(), tiny_head()
    (a, features_a), (b, features_b) = tiny_sample(seed=1), tiny_sample(num_tokens=13, seed=2)
    anchors_b = torch.tensor([7])
    with torch.no_grad():
        packed = drafter([features_a, features_b], [ANCHORS, anchors_b], [ids_of(a), ids_of(b)], head)
        alone_a = drafter([features_a], [ANCHORS], [ids_of(a)], head)
        alone_b = drafter([features_b], [anchors_b], [ids_of(b)], head)
    torch.testing.assert_close(packed, torch.cat((alone_a, alone_b)), atol=1e-5, rtol=1e-5)


def test_decoding_step_by_step_gives_what_training_gives() -> None:
    drafter, (sample, features), head = tiny_drafter(), tiny_sample(), tiny_head()
    context, known = drafter.empty_context(), 0
    trained = blocks(drafter, features)
    with torch.no_grad():
        for block, anchor in enumerate(ANCHORS.tolist()):
            context = drafter.extend_context(context, features[known:anchor], known)
            known = anchor
            drafted = drafter.draft(context, int(sample.input_ids[anchor]), anchor, head)
            torch.testing.assert_close(drafted, trained[block, 1:], atol=1e-5, rtol=1e-5)


def test_a_context_that_went_too_far_is_replaced_from_a_token_on() -> None:
    drafter, (_, features) = tiny_drafter(), tiny_sample()
    with torch.no_grad():
        wrong = drafter.extend_context(drafter.empty_context(), torch.zeros(12, FEATURES), 0)
        mended = drafter.extend_context(wrong, features, 0)
        straight = drafter.contexts([features])[0]
    torch.testing.assert_close(mended.keys[0], straight.keys[0])
    with pytest.raises(DrafterError, match="without gaps"):
        drafter.extend_context(drafter.empty_context(), features, 3)


def test_an_anchor_without_its_context_is_refused() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample()
    context = drafter.extend_context(drafter.empty_context(), features[:5], 0)
    with pytest.raises(DrafterError, match="before anchor 6"):
        drafter.draft(context, int(sample.input_ids[6]), 6, tiny_head())


def test_the_floor_sees_no_state_at_all() -> None:
    drafter, (_, features) = tiny_drafter(features=False), tiny_sample()
    assert torch.equal(blocks(drafter, features), blocks(drafter, features * 3 + 1))


def test_the_feature_scale_is_applied_before_fc() -> None:
    plain, scaled = tiny_drafter(), tiny_drafter()
    scaled.feature_scale.copy_(torch.linspace(0.5, 2.0, FEATURES))
    _, features = tiny_sample()
    torch.testing.assert_close(
        blocks(scaled, features), blocks(plain, features * scaled.feature_scale), atol=1e-5, rtol=1e-5
    )


def test_without_context_the_layers_are_qwen3s_without_a_causal_mask() -> None:
    drafter = tiny_drafter(features=False)
    shape = drafter.shape
    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, vocab_size=shape.vocab_size, rope_parameters=dict(shape.rope),
        attn_implementation="eager",
    )  # fmt: skip
    reference = Qwen3Model(config).eval()
    missing = reference.load_state_dict(drafter.state_dict(), strict=False).missing_keys
    assert missing == ["embed_tokens.weight"]
    sample, features = tiny_sample()
    head = tiny_head()
    ids = torch.tensor([[int(sample.input_ids[6]), *[MASK] * (BLOCK - 1)]])
    with torch.no_grad():
        expected = reference(
            inputs_embeds=head.embedding_VH[ids],
            position_ids=torch.arange(6, 6 + BLOCK)[None],
            attention_mask=torch.zeros(1, 1, BLOCK, BLOCK),
        ).last_hidden_state
        found = drafter([features], [torch.tensor([6])], [ids_of(sample)], head)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def one_block(drafter: Drafter, features: torch.Tensor, anchor: int, anchor_id: int) -> torch.Tensor:
    """A block written out: keys of the tokens before the anchor, then of the block, every head on its own."""
    shape, weights = drafter.shape, drafter.state_dict()
    config = Qwen3Config(head_dim=shape.head_dim, rope_parameters=dict(shape.rope))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], shape.rms_norm_eps)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"]).view(1, len(x), -1, shape.head_dim).transpose(1, 2)

    cos, sin = Qwen3RotaryEmbedding(config)(features, torch.arange(anchor + BLOCK)[None])
    context = norm(features[:anchor] @ weights["fc.weight"].T, "hidden_norm")
    x = tiny_head().embedding_VH[torch.tensor([anchor_id, *[MASK] * (BLOCK - 1)])]
    for i in range(shape.num_layers):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        both = torch.cat((context, h))
        queries = norm(heads(torch.cat((torch.zeros_like(context), h)), f"{at}.q_proj"), f"{at}.q_norm")
        keys = norm(heads(both, f"{at}.k_proj"), f"{at}.k_norm")
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        group = shape.num_heads // shape.num_kv_heads
        keys, values = (y.repeat_interleave(group, 1) for y in (keys, heads(both, f"{at}.v_proj")))
        shares = torch.softmax(queries[:, :, anchor:] @ keys.mT * shape.head_dim**-0.5, -1)
        x = x + (shares @ values).transpose(1, 2).reshape(BLOCK, -1) @ weights[f"{at}.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        mlp = [weights[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")]
        x = x + (F.silu(h @ mlp[0]) * (h @ mlp[1])) @ mlp[2]
    return norm(x, "norm")


def test_with_context_every_block_is_the_one_written_out() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample()
    with torch.no_grad():
        expected = torch.stack([one_block(drafter, features, a, int(sample.input_ids[a])) for a in ANCHORS.tolist()])
    torch.testing.assert_close(blocks(drafter, features), expected, atol=1e-4, rtol=1e-4)


def test_parameters_are_named_as_z_lab_names_them() -> None:
    drafter = Drafter(tiny_shape(num_layers=1))
    attention = (f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
    mlp = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    layer = ("input_layernorm", "post_attention_layernorm", *attention, *mlp)
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.0.{name}.weight" for name in layer)}
    assert {name for name, _ in drafter.named_parameters()} == expected
    assert set(drafter.state_dict()) == expected | {"feature_scale"}


def test_every_parameter_learns() -> None:
    drafter, (sample, features) = tiny_drafter().train(), tiny_sample()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter([features.bfloat16()], [ANCHORS], [ids_of(sample)], tiny_head())
    assert hidden.dtype == torch.float32
    hidden[:, 1:].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())


def test_a_drafter_in_bfloat16_keeps_its_places_exact() -> None:
    drafter, (_, features) = tiny_drafter(), tiny_sample()
    exact = blocks(drafter, features)
    far = drafter._rotation(torch.tensor([4001]))[0]
    rounded = blocks(drafter.to(torch.bfloat16), features)
    assert torch.equal(far, drafter._rotation(torch.tensor([4001]))[0])
    assert F.cosine_similarity(rounded.float(), exact, dim=-1).min() > 0.98


def test_weights_are_drawn_by_name() -> None:
    a, b = Drafter(tiny_shape(), 3), Drafter(tiny_shape(num_layers=3), 3)
    assert torch.equal(a.layers[1].mlp.up_proj.weight, b.layers[1].mlp.up_proj.weight)
    assert not torch.equal(a.layers[0].mlp.up_proj.weight, a.layers[1].mlp.up_proj.weight)
    assert not torch.equal(a.fc.weight, Drafter(tiny_shape(), 4).fc.weight)


def test_scaled_rope_moves_the_result() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    _, features = tiny_sample()
    assert (blocks(tiny_drafter(rope=rope), features) - blocks(tiny_drafter(), features)).abs().max() > 1e-3


def test_head_scales_and_caps_are_applied() -> None:
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    plain = head_logits(hidden, tiny_head())
    torch.testing.assert_close(head_logits(hidden, tiny_head(logit_scale=0.5)), plain * 0.5)
    torch.testing.assert_close(head_logits(hidden, tiny_head(softcap=3.0)), torch.tanh(plain / 3) * 3)
    drafter, (sample, features) = tiny_drafter(), tiny_sample()
    with torch.no_grad():
        scaled = drafter([features], [ANCHORS], [ids_of(sample)], tiny_head(embedding_scale=2.0))
    assert (scaled - blocks(drafter, features)).abs().max() > 1e-3


def test_no_anchor_at_all_is_refused() -> None:
    drafter, (sample, features) = tiny_drafter(), tiny_sample()
    with pytest.raises(DrafterError, match="at least one anchor"):
        drafter([features], [torch.tensor([], dtype=torch.int64)], [ids_of(sample)], tiny_head())
