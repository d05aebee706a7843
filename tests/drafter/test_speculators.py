"""speculators' layout: read, refused by key, written."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.drafter.speculators import load_any, shape_from_speculators, speculators_config
from headrace.errors import ExportError
from tests.drafter.tiny import tiny_shape


def config(**changes: Any) -> dict[str, Any]:
    written = speculators_config(tiny_shape(), "target", ["LlamaForCausalLM"], {"eos_token_id": 2}, {})
    return json.loads(json.dumps(written)) | changes


def test_a_shape_comes_back_as_it_was_written() -> None:
    shape = tiny_shape()
    assert shape_from_speculators(config(), shape.num_target_layers) == shape


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"draft_vocab_size": 999}, "draft_vocab_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"target_hidden_size": 7}, "target_hidden_size"),
        ({"aux_hidden_state_layer_ids": [1, 99]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
    ],
)
def test_what_headraces_drafter_does_not_compute_is_refused_by_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        shape_from_speculators(config(**changes), tiny_shape().num_target_layers)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"config\.json"):
        load_any(tmp_path, 5)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ExportError, match=r"config\.json"):
        load_any(tmp_path, 5)
