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


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "null"])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(TargetError, match=INDEX):
        weight_files(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 100, -10])
def test_a_file_that_is_cut_off_is_named(folders: dict[str, Path], tmp_path: Path, left: int) -> None:
    content = (folders["llama"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:left])
    with pytest.raises(TargetError, match=rf"{tmp_path}/model\.safetensors"):
        Weights(tmp_path)


def test_a_file_that_breaks_after_it_was_opened_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((folders["llama"] / "model.safetensors").read_bytes())
    weights = Weights(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TargetError, match=r"model\.safetensors"):
        weights.read(["model.norm.weight"], "norm")


def test_a_folder_named_like_weights_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(TargetError, match=r"model\.safetensors"):
        weights_hash(tmp_path)


def test_a_folder_that_is_not_there_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        weight_files(tmp_path / "absent")
