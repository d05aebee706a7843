import pytest

from headrace.errors import PlanError
from headrace.plan.blocks import Fields, mixer, mlp
from tests.plan.models import LLAMA, QWEN_27B


def test_a_dense_block_is_counted_by_its_matrices() -> None:
    fields = Fields(LLAMA, "llama")
    assert mixer(fields, 0).params == 64 * (4 + 2 + 2 + 4) * 16
    assert mixer(fields, 0).kv_elements == 2 * 2 * 16
    assert mlp(fields, 0).params == mlp(fields, 0).active == 3 * 64 * 128


def test_linear_attention_keeps_a_state_and_no_cache() -> None:
    fields = Fields(QWEN_27B["text_config"], "qwen")
    linear, full = mixer(fields, 0), mixer(fields, 3)
    assert (linear.kind, linear.kv_elements) == ("linear", 0)
    assert linear.state_elements >= 48 * 128 * 128
    assert (full.kind, full.kv_elements) == ("full", 2 * 4 * 256)


def test_only_the_experts_that_are_chosen_are_at_work() -> None:
    fields = Fields({**LLAMA, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "moe")
    found = mlp(fields, 0)
    assert found.params == 64 * 16 + 16 * 3 * 64 * 32
    assert found.active == 64 * 16 + 2 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({"first_k_dense_replace": 2}, [False, False, True, True]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"mlp_only_layers": [1]}, [True, False, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, [False, True, False, True]),
    ],
)
def test_every_way_to_name_the_sparse_blocks_is_read(keys: dict[str, object], sparse: list[bool]) -> None:
    fields = Fields(
        {**LLAMA, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **keys}, "moe"
    )
    assert [mlp(fields, i).params != mlp(fields, i).active for i in range(4)] == sparse


def test_sliding_blocks_are_told_from_full_ones() -> None:
    fields = Fields({**LLAMA, "model_type": "gemma2", "sliding_window": 16}, "gemma")
    assert [mixer(fields, i).window for i in range(4)] == [16, None, 16, None]
    off = Fields({**LLAMA, "sliding_window": 16, "use_sliding_window": False}, "qwen2")
    assert mixer(off, 0).window is None


def test_latent_attention_caches_one_latent_a_token() -> None:
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    found = mixer(Fields({**LLAMA, **latent}, "mla"), 0)
    assert (found.kind, found.kv_elements) == ("latent", 12)
    assert found.params == 64 * 4 * 12 + 64 * 12 + 8 * 4 * 16 + 4 * 8 * 64


def test_a_missing_key_is_named() -> None:
    with pytest.raises(PlanError, match=r"hidden_size.*of x"):
        mixer(Fields({"num_attention_heads": 4}, "x"), 0)
    with pytest.raises(PlanError, match="a whole number"):
        Fields({"hidden_size": "big"}, "x").need("hidden_size")
