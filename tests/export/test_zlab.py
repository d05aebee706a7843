"""What is written, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.drafter.model import Drafter
from headrace.drafter.stock import load_stock
from headrace.errors import ExportError
from headrace.export.zlab import export_zlab, serve_commands, stock_scales, stock_tensors
from headrace.target.head import FrozenHead
from tests.evaluate.conftest import Pair, shape


def test_exactly_the_trained_tensors_are_written_in_bfloat16(pair: Pair, tmp_path: Path) -> None:
    export_zlab(pair.drafter, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == {name for name, _ in pair.drafter.named_parameters()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())
    for name, parameter in pair.drafter.named_parameters():
        if name != "fc.weight":
            assert torch.equal(written[name], parameter.bfloat16())
    folded = pair.drafter.fc.weight * pair.drafter.feature_scale
    assert torch.equal(written["fc.weight"], folded.bfloat16())


def test_the_config_has_the_keys_engines_read(pair: Pair, tmp_path: Path) -> None:
    export_zlab(pair.drafter, tmp_path, special_ids={"eos_token_id": 2})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 5
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert config["dflash_config"]["mask_token_id"] == 5
    assert config["num_target_layers"] == 5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["eos_token_id"] == 2


def test_a_folder_comes_back_as_the_drafter_it_was(pair: Pair, tmp_path: Path) -> None:
    export_zlab(pair.drafter, tmp_path)
    back = load_stock(tmp_path)
    assert back.shape == pair.drafter.shape
    assert torch.equal(back.feature_scale, torch.ones_like(back.feature_scale))


def test_the_floor_and_broken_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    floor = Drafter(dataclasses.replace(shape(), features=False), seed=0)
    with pytest.raises(ExportError, match="no-features floor"):
        stock_tensors(floor)
    broken = Drafter(shape(), seed=0)
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    with pytest.raises(ExportError, match=r"norm\.weight"):
        export_zlab(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_vllm_counts_drafted_tokens_and_sglang_the_block() -> None:
    commands = serve_commands("Qwen/Qwen3-8B", Path("out/drafter"), 16)
    assert '"num_speculative_tokens":15' in commands["vllm"]
    assert "--speculative-num-draft-tokens 16" in commands["sglang"]
    assert "--speculative-algorithm DFLASH" in commands["sglang"]


def test_scales_of_the_target_are_told_to_engines() -> None:
    table = torch.zeros(4, 2)
    head = FrozenHead(table, table, torch.ones(2), 2.0, 0.5, 30.0)
    assert stock_scales(head) == {
        "input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0,
    }  # fmt: skip
