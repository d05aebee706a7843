"""Stock configs are read in the layouts that exist, and what the drafter does not compute is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ExportError
from headrace.evaluate.stock import load_stock, shape_from_stock, stock_config
from headrace.export.zlab import export_zlab
from tests.evaluate.conftest import Pair, shape


def config(**changes: Any) -> dict[str, Any]:
    return {**stock_config(shape(), {}, {}), **changes}


def test_a_shape_survives_its_config() -> None:
    assert shape_from_stock(json.loads(json.dumps(config()))) == shape()


def test_windowed_layers_come_back_and_say_that_they_are_not_causal() -> None:
    windowed = replace(shape(), layer_types=("sliding_attention", "full_attention"), sliding_window=6)
    made = stock_config(windowed, {}, {})
    assert shape_from_stock(json.loads(json.dumps(made))) == windowed
    assert made["is_causal"] is False
    assert made["dflash_config"]["causal"] is False
    assert "is_causal" not in stock_config(shape(), {}, {})


def test_older_layouts_of_rope_and_block_size_are_read() -> None:
    old = config()
    del old["rope_parameters"], old["dflash_config"]["block_size"]
    old["rope_scaling"] = {"type": "linear", "factor": 2.0}
    read = shape_from_stock(old)
    assert read.rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert read.block_size == shape().block_size


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"attention_bias": True},
        {"is_causal": True},
    ],
)
def test_what_the_drafter_does_not_compute_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ExportError):
        shape_from_stock(config(**changes))


@pytest.mark.parametrize("key", ["hidden_size", "num_target_layers", "rope_theta", "dflash_config"])
def test_a_missing_key_is_named(key: str) -> None:
    broken = config()
    del broken[key]
    broken.pop("rope_parameters")
    with pytest.raises(ExportError, match=key):
        shape_from_stock(broken)


def test_damaged_folders_are_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"config\.json"):
        load_stock(tmp_path)
    export_zlab(pair.drafter, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ExportError):
        load_stock(tmp_path)
