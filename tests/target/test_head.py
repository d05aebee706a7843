import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, CohereConfig, Gemma2Config, GemmaConfig, GraniteConfig

from headrace.errors import TargetError
from headrace.target.head import _norm, load_head
from tests.target.conftest import LoadTiny


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen3", "qwen3-sharded"])
def test_the_head_is_the_models_own(load_tiny: LoadTiny, folders: dict[str, Path], name: str) -> None:
    model = load_tiny(name).model
    head = load_head(folders[name], model.config)
    assert head.embedding_VH.equal(model.get_input_embeddings().weight)
    assert head.head_VH.equal(model.get_output_embeddings().weight)
    assert head.norm_H.equal(model.model.norm.weight)
    assert head.tied == (name in {"llama", "qwen3"})
    assert (head.embedding_scale, head.logit_scale, head.softcap) == (1.0, 1.0, None)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_final_norm_is_the_models_own(load_tiny: LoadTiny, folders: dict[str, Path], name: str) -> None:
    model = load_tiny(name).model
    final = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 5
    head = load_head(folders[name], model.config)
    torch.testing.assert_close(head.normed(final), model.model.norm(final), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "norm"), [(Gemma2Config, "Gemma2RMSNorm"), (GemmaConfig, "GemmaRMSNorm")])
def test_gemmas_norm_stores_weights_less_one(folders: dict[str, Path], kind: Any, norm: str) -> None:
    head = load_head(folders["llama"], AutoConfig.from_pretrained(folders["llama"]))
    module = importlib.import_module(f"transformers.models.{kind.model_type}.modeling_{kind.model_type}")
    own = getattr(module, norm)(len(head.norm_H), eps=1e-5)
    own.weight.data = torch.linspace(-0.5, 0.5, len(head.norm_H))
    moved = replace(head, norm_H=own.weight.data, **_norm(kind(rms_norm_eps=1e-5)))
    final = torch.randn(3, len(head.norm_H), generator=torch.Generator().manual_seed(0)) * 5
    torch.testing.assert_close(moved.normed(final), own(final), rtol=1e-6, atol=1e-6)


def test_a_layer_norm_is_refused(folders: dict[str, Path]) -> None:
    assert _norm(CohereConfig()) == {}
    head = replace(load_head(folders["llama"], AutoConfig.from_pretrained(folders["llama"])), norm_eps=None)
    with pytest.raises(TargetError, match="RMS norm"):
        head.normed(torch.zeros(1, 32))


def rename(folder: Path, into: Path, names: dict[str, str]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    into.mkdir()
    save_file({names.get(k, k): v for k, v in tensors.items()}, into / "model.safetensors")
    return into


def test_nested_prefixes_are_found(folders: dict[str, Path], tmp_path: Path) -> None:
    nested = {f"model.{k}.weight": f"model.language_model.{k}.weight" for k in ("embed_tokens", "norm")}
    folder = rename(folders["llama-untied"], tmp_path / "nested", nested)
    config = AutoConfig.from_pretrained(folders["llama-untied"])
    plain, found = load_head(folders["llama-untied"], config), load_head(folder, config)
    assert found.embedding_VH.equal(plain.embedding_VH)
    assert found.norm_H.equal(plain.norm_H)


def test_a_missing_head_lists_what_was_looked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rename(folders["llama-untied"], tmp_path / "odd", {"lm_head.weight": "output.weight"})
    with pytest.raises(TargetError, match=r"the head .*lm_head\.weight, model\.lm_head\.weight"):
        load_head(folder, AutoConfig.from_pretrained(folders["llama-untied"]))


def test_another_size_than_the_config_says_is_refused(folders: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(folders["llama"])
    config.vocab_size = 100
    with pytest.raises(TargetError, match=r"embedding \[100, 32\]"):
        load_head(folders["llama"], config)


def test_a_norm_of_another_size_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["llama"] / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(31)}, tmp_path / "model.safetensors")
    with pytest.raises(TargetError, match=r"norm \[32\] as .*config\.json says, found \[31\]"):
        load_head(tmp_path, AutoConfig.from_pretrained(folders["llama"]))


def test_a_head_moves_whole_and_stays_tied(folders: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(folders["llama"])
    moved = load_head(folders["llama"], config).to("cpu", torch.bfloat16)
    assert moved.tied
    assert moved.head_VH.dtype == moved.norm_H.dtype == torch.bfloat16


SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 64, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GemmaConfig(**SIZES), (32**0.5, 1.0, None)),
        (Gemma2Config(final_logit_softcapping=30.0, **SIZES), (32**0.5, 1.0, 30.0)),
        (GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0, **SIZES), (12.0, 0.125, None)),
        (CohereConfig(logit_scale=0.0625, **SIZES), (1.0, 0.0625, None)),
    ],
)
def test_scales_and_soft_caps_come_from_the_config(
    folders: dict[str, Path], config: Any, expected: tuple[float, float, float | None]
) -> None:
    head = load_head(folders["llama"], config)
    assert (head.embedding_scale, head.logit_scale, head.softcap) == pytest.approx(expected)


def test_an_architecture_with_unknown_ends_is_refused_by_name(folders: dict[str, Path]) -> None:
    text = SimpleNamespace(model_type="watermill", **SIZES)
    with pytest.raises(TargetError, match="watermill"):
        load_head(folders["llama"], SimpleNamespace(get_text_config=lambda: text))
