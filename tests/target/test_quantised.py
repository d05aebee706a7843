"""Quantised folders are recognised by what they say of themselves, and their ends are read whole or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import TargetConfig
from headrace.errors import TargetError
from headrace.prepare.model_files import load_config
from headrace.target.head import load_head
from headrace.target.quantised import MODELOPT, read_quantisation
from headrace.target.transformers_target import load_target
from headrace.testing.tiny_target import save_tiny_target

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}


def told(folder: Path, quantisation: dict[str, Any], nested: bool = False) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if nested else config)["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("found", "method"),
    [(FP8, "fp8"), (AWQ, "awq"), (NVFP4, "NVFP4"), (PACKED, "NVFP4"), ({"bits": 4}, "an unnamed method")],
)
def test_a_method_is_named_and_kept_whole(tmp_path: Path, found: dict[str, Any], method: str) -> None:
    read = read_quantisation(told(save_tiny_target(tmp_path), found))
    assert read.method == method
    assert json.loads(read.identity) == found
    assert method in read.hint


def test_the_text_parts_own_and_modelopts_file_are_read_too(tmp_path: Path) -> None:
    nested = told(save_tiny_target(tmp_path / "nested", "qwen3_5"), FP8, nested=True)
    assert read_quantisation(nested).method == "fp8"
    beside = save_tiny_target(tmp_path / "beside")
    (beside / MODELOPT).write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}})
    )
    assert read_quantisation(beside).method == "NVFP4"
    (beside / MODELOPT).unlink()
    assert (read_quantisation(beside).method, read_quantisation(beside).identity) == (None, "none")


@pytest.mark.parametrize("found", [AWQ, NVFP4])
def test_weights_that_do_not_load_here_are_refused_with_what_to_do(tmp_path: Path, found: dict[str, Any]) -> None:
    folder = told(save_tiny_target(tmp_path), found)
    with pytest.raises(TargetError, match="quantised"):
        load_target(TargetConfig(model=str(folder), dtype="float32", device="cpu"))


@pytest.mark.parametrize("found", [FP8, AWQ, NVFP4])
def test_ends_that_were_left_whole_are_read(tmp_path: Path, found: dict[str, Any]) -> None:
    """As in published folders: blocks are quantised, embedding, head and norms are not."""
    folder = save_tiny_target(tmp_path, "qwen3", tied=False)
    before = load_head(folder, load_config(folder))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told(folder, found)
    after = load_head(folder, load_config(folder))
    assert torch.equal(after.head_VH, before.head_VH)
    assert torch.equal(after.embedding_VH, before.embedding_VH)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_quantised_head_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_tiny_target(tmp_path, "qwen3", tied=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].abs().to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"head .*config\.json says, found .*(float8|uint8)"):
        load_head(folder, load_config(folder))
