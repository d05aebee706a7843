import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.errors import TargetError
from headrace.target.weights import INDEX, Weights, weight_files, weights_hash


def test_a_tensor_is_read_from_whichever_file_holds_it(folders: dict[str, Path]) -> None:
    folder = folders["qwen3-sharded"]
    assert len(weight_files(folder)) > 2
    weights = Weights(folder)
    for key in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        expected = load_file(weights.where[key])[key]
        assert weights.read([key], "tensor").equal(expected)


def test_a_missing_key_lists_what_was_looked_for_and_what_looks_alike(folders: dict[str, Path]) -> None:
    looked_for = ["decoder.norm.weight", "transformer.norm.weight"]
    with pytest.raises(TargetError) as caught:
        Weights(folders["llama"]).read(looked_for, "final norm")
    assert all(key in str(caught.value) for key in (*looked_for, "model.norm.weight"))


def test_the_hash_covers_every_byte_and_name(folders: dict[str, Path], tmp_path: Path) -> None:
    content = (folders["llama"] / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert weights_hash(tmp_path) == weights_hash(folders["llama"])
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights_hash(tmp_path) != weights_hash(folders["llama"])


def test_a_damaged_file_and_a_damaged_index_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(TargetError, match=r"model\.safetensors"):
        Weights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(TargetError, match="weight_map"):
        weight_files(tmp_path)


def test_a_folder_that_is_not_there_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        weight_files(tmp_path / "absent")
