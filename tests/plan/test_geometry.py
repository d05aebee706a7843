import json
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.plan.geometry import find_config, geometry_from_config, plain_geometry, read_geometry
from tests.plan.models import CONFIGS, LLAMA, QWEN_27B, published

# Billions of parameters (in all, at work in the blocks) as their makers say, where they say it; towers left out.
PUBLISHED = {
    "HuggingFaceTB--SmolLM-1.7B.json": 1.71,
    "MiniMaxAI--MiniMax-M2.5.json": 229,
    "Qwen--Qwen2.5-0.5B.json": 0.494,
    "Qwen--Qwen3-0.6B.json": 0.596,
    "Qwen--Qwen3-1.7B.json": 1.72,
    "Qwen--Qwen3-235B-A22B.json": 235,
    "Qwen--Qwen3-30B-A3B.json": 30.5,
    "Qwen--Qwen3-32B.json": 32.8,
    "Qwen--Qwen3-4B.json": 4.02,
    "Qwen--Qwen3-8B.json": 8.19,
    "XiaomiMiMo--MiMo-V2-Flash.json": 309,
    "deepseek-ai--DeepSeek-R1.json": 671,
    "deepseek-ai--DeepSeek-V3.json": 671,
    "deepseek-ai--DeepSeek-V4-Flash.json": 284,
    "google--gemma-2-2b-it.json": 2.61,
    "google--gemma-3-1b-it.json": 1.0,
    "meta-llama--Llama-3.1-8B-Instruct.json": 8.03,
    "meta-llama--Llama-3.2-1B.json": 1.24,
    "meta-llama--Meta-Llama-3.1-70B.json": 70.6,
    "openai--gpt-oss-120b.json": 117,
    "openai--gpt-oss-20b.json": 20.9,
}
TARGETS = sorted(CONFIGS.glob("*.json")) + sorted(CONFIGS.glob("derived/*.json"))
DRAFTERS = sorted(CONFIGS.glob("drafts/**/*.json"))


def test_the_27b_target_is_read_from_its_nested_text_part() -> None:
    target = geometry_from_config(QWEN_27B, "Qwen3.6-27B")
    assert (target.hidden_size, target.num_blocks, target.vocab_size) == (5120, 64, 248320)
    assert target.kinds() == {"linear": 48, "full": 16}
    assert target.active_block_params == pytest.approx(24.3e9, rel=0.005)
    assert target.params == pytest.approx(26.9e9, rel=0.005)
    assert any("towers" in note for note in target.notes)


def test_the_demo_is_known_without_a_file() -> None:
    assert read_geometry("demo").params == pytest.approx(134.5e6, rel=0.001)


@pytest.mark.skipif(not TARGETS, reason="shared data absent: model_configs")
@pytest.mark.parametrize("path", TARGETS, ids=lambda p: p.stem)
def test_every_published_target_is_read(path: Path) -> None:
    target = read_geometry(str(path))
    assert target.num_blocks == len(target.mixers)
    assert 0 < target.active_block_params <= target.block_params
    assert target.kv_bytes(1000) > 0


@pytest.mark.skipif(not DRAFTERS, reason="shared data absent: model_configs/drafts")
@pytest.mark.parametrize("path", DRAFTERS, ids=lambda p: p.stem)
def test_every_published_drafter_is_refused_as_a_target(path: Path) -> None:
    with pytest.raises(PlanError, match=r"a drafter's|known architecture"):
        read_geometry(str(path))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones_within_one_percent(name: str) -> None:
    assert read_geometry(str(published(name))).params == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


def test_a_sliding_window_bounds_the_cache() -> None:
    sliding = geometry_from_config({**LLAMA, "model_type": "gemma2", "sliding_window": 16}, "g")
    full = geometry_from_config(LLAMA, "l")
    assert sliding.kv_bytes(16) == full.kv_bytes(16)
    assert sliding.kv_bytes(1000) < full.kv_bytes(1000)
    assert sliding.attention_flops(1000) < full.attention_flops(1000)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="model_type mystery"):
        geometry_from_config({**LLAMA, "model_type": "mystery"}, "x")
    with pytest.raises(PlanError, match="model_type missing"):
        geometry_from_config({}, "x")


def test_a_missing_key_is_refused_by_name() -> None:
    broken = {k: v for k, v in LLAMA.items() if k != "hidden_size"}
    with pytest.raises(PlanError, match="hidden_size"):
        geometry_from_config(broken, "x")


def test_folders_files_and_cached_hub_ids_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_config("owner/name") == snapshot / "config.json"
    assert find_config(str(snapshot)) == find_config(str(snapshot / "config.json"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for missing in (str(tmp_path), str(tmp_path / "no" / "such"), "name"):
        with pytest.raises(PlanError):
            find_config(missing)
    broken = tmp_path / "config.json"
    for text in ("{", "[]"):
        broken.write_text(text, encoding="utf-8")
        with pytest.raises(PlanError):
            read_geometry(str(broken))


def test_plain_numbers_stand_for_a_config() -> None:
    target = plain_geometry(5120, 64, 27e9, 3e9)
    assert (target.params, target.active_params) == (27e9, 3e9)
    with pytest.raises(PlanError):
        plain_geometry(0, 64, 27e9)
