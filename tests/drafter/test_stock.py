"""Stock configs are read in the layouts that exist, and what the drafter does not compute is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.drafter.model import Drafter
from headrace.drafter.stock import CONFIG, WEIGHTS, load_stock, shape_from_stock, stock_config, tensor_shapes
from headrace.errors import ExportError
from headrace.export.zlab import export_zlab
from tests.drafter.tiny import tiny_shape
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


def test_causal_sliding_layers_are_what_a_config_means_that_says_nothing() -> None:
    kinds = ("sliding_attention", "full_attention")
    causal = replace(shape(), layer_types=kinds, sliding_window=6, sliding_causal=True)
    made = json.loads(json.dumps(stock_config(causal, {}, {})))
    assert "is_causal" not in made
    assert "causal" not in made["dflash_config"], "true would make layers with full attention causal too"
    assert shape_from_stock(made) == causal
    with pytest.raises(ExportError, match="is_causal True"):
        shape_from_stock(made | {"is_causal": True})
    every = replace(causal, layer_types=kinds[:1] * 2)
    assert shape_from_stock(stock_config(every, {}, {}) | {"is_causal": True}) == every
    own = made["dflash_config"] | {"causal": False}
    assert not shape_from_stock(made | {"dflash_config": own}).sliding_causal
    assert shape_from_stock(made | {"dflash_config": {**own, "causal": True}, "is_causal": False}).window(0) == (
        6,
        False,
    )


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
        {"layer_types": ["sliding_attention", "full_attention"]},  # without a window
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


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": "x"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"dflash_config": []}, "dflash_config"),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": 5, "rope_theta": 1.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"sliding_window": "x"}, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"], "is_causal": False}, "sliding_window"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"block_size": 1}, "block_size"),
        ({"is_causal": "no"}, "is_causal"),
    ],
)
def test_a_wrong_key_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ExportError, match=key):
        shape_from_stock(config(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_token_id", "a"),
        ("mask_token_id", -1),
        ("mask_token_id", 10**6),
        ("target_layer_ids", [99]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", []),
        ("target_layer_ids", "x"),
        ("block_size", 0),
    ],
)
def test_a_wrong_key_of_its_own_section_is_named(key: str, value: Any) -> None:
    own = {**config()["dflash_config"], key: value}
    with pytest.raises(ExportError, match=rf"dflash_config\.{key}"):
        shape_from_stock(config(dflash_config=own))


@pytest.mark.parametrize("value", [[], 5, None, {}])
def test_what_is_no_config_is_refused(value: Any) -> None:
    with pytest.raises(ExportError, match="DFlashDraftModel"):
        shape_from_stock(value)


def test_the_shapes_are_those_of_the_drafter() -> None:
    made = {name: tuple(p.shape) for name, p in Drafter(shape(), seed=0).named_parameters()}
    assert tensor_shapes(shape()) == made


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hidden_size": 64}, "weight of shape"),
        ({"intermediate_size": 10**9}, "mlp"),
        ({"num_hidden_layers": 3, "layer_types": None}, "layers.2"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "spiral"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": "x"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0, "beta_fast": "x"}}, "beta_fast"),
    ],
)
def test_a_config_that_does_not_belong_to_the_tensors_is_refused(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    export_zlab(pair.drafter, tmp_path)
    written = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**written, **changes}))
    with pytest.raises(ExportError, match=found):
        load_stock(tmp_path)


def test_tensors_of_whole_numbers_are_refused(pair: Pair, tmp_path: Path) -> None:
    export_zlab(pair.drafter, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ExportError, match="int8"):
        load_stock(tmp_path)


@pytest.mark.parametrize("key", ["attention_sink_bias", "attention_value_scale", "use_swa"])
def test_attention_that_headrace_does_not_compute_is_refused_by_key(key: str) -> None:
    config = stock_config(tiny_shape(), {}, {})
    config["dflash_config"][key] = 0.5 if key.endswith("scale") else True
    with pytest.raises(ExportError, match=key):
        shape_from_stock(config)
