import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.plan.drafter import DrafterChoice, derive_drafter, read_drafter, with_features
from headrace.plan.geometry import geometry_from_config
from tests.plan.models import LLAMA, QWEN_27B, published

TARGET = geometry_from_config(QWEN_27B, "Qwen3.6-27B")
PUBLISHED = derive_drafter(TARGET, 25_600, DrafterChoice(num_heads=32, num_kv_heads=8, head_dim=128))


def test_the_published_27b_drafter_has_1_73_billion_parameters() -> None:
    assert PUBLISHED.params == pytest.approx(1.730e9, rel=0.001)
    assert PUBLISHED.layer_params == pytest.approx(319.8e6, rel=0.001)
    assert PUBLISHED.fc_params == pytest.approx(131.1e6, rel=0.001)
    assert PUBLISHED.export_bytes().value == pytest.approx(3.46e9, rel=0.001)


def test_a_step_costs_14_7_gflop_a_slot_and_1_1_a_context_token() -> None:
    assert PUBLISHED.position_flops().value == pytest.approx(14.7e9, rel=0.005)
    assert PUBLISHED.context_flops().value == pytest.approx(1.10e9, rel=0.005)
    assert PUBLISHED.sample_flops(800, 512).value == pytest.approx(121e12, rel=0.005)
    assert PUBLISHED.sample_flops(800, 256).value == pytest.approx(61e12, rel=0.005)


def test_training_takes_sixteen_bytes_a_parameter_and_more() -> None:
    memory = PUBLISHED.train_memory(800, 512)
    assert memory.value > 16 * PUBLISHED.params
    assert replace(PUBLISHED, num_layers=2).train_memory(800, 512).value < memory.value
    assert PUBLISHED.train_memory(800, 64).value < memory.value


def test_a_narrow_latent_makes_a_small_fc() -> None:
    assert with_features(PUBLISHED, 5120).fc_params == 5120 * 5120


def test_a_published_config_gives_shape_and_taps() -> None:
    size, taps = read_drafter(published("drafts/specforge/qwen3.6-27b-dflash.json"), 25_600)
    assert size == PUBLISHED
    assert taps == (1, 16, 31, 46, 61)


def test_what_the_target_does_not_say_is_assumed_aloud() -> None:
    moe = geometry_from_config(
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "moe"
    )
    size = derive_drafter(moe, 320, DrafterChoice())
    assert size.intermediate_size == 3 * 64
    assert "assumed" in size.notes[0]


def test_another_kind_of_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    with pytest.raises(PlanError, match="DFlash"):
        read_drafter(tmp_path, 1)
