"""Small files of a model folder, whole and broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from headrace.errors import TargetError
from headrace.prepare.model_files import (
    Reading,
    check_json,
    load_config,
    load_generation_config,
    load_tokenizer,
    max_positions,
)
from tests.prepare.tiny import tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(tmp_path)
    LlamaConfig(max_position_embeddings=77).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_whole_folder_is_read(folder: Path) -> None:
    assert load_config(folder).model_type == "llama"
    assert load_generation_config(folder).eos_token_id == 2
    assert load_tokenizer(folder).eos_token == "<|end|>"


LOADERS: dict[str, Callable[[Path], Any]] = {
    "config.json": load_config,
    "generation_config.json": load_generation_config,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000], ids=repr)
@pytest.mark.parametrize("name", LOADERS)
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(TargetError, match=rf"{folder / name}"):
        LOADERS[name](folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"hidden_size": "wide"}),
        ("config.json", {"model_type": ["llama"]}),
        ("config.json", {"model_type": "watermill"}),
        ("config.json", {"layer_types": ["odd"]}),
        ("tokenizer.json", {"model": {"type": "BPE"}}),  # tokenizers raises a plain Exception
        ("tokenizer.json", {"added_tokens": 5}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder: Path, name: str, values: dict[str, Any]) -> None:
    change(folder / name, **values)
    with pytest.raises(TargetError, match=name):
        LOADERS[name](folder)


def test_what_is_not_there_is_named_or_left_out(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=rf"no {tmp_path}/config\.json"):
        load_config(tmp_path)
    with pytest.raises(TargetError, match=f"a tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)
    assert load_generation_config(tmp_path) is None
    with pytest.raises(TargetError, match="absent"):
        check_json(tmp_path / "absent")


def test_positions_come_from_the_text_config(folder: Path, tmp_path: Path) -> None:
    assert max_positions(folder) == 77
    text = {"model_type": "gemma3_text", "max_position_embeddings": 99}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert max_positions(folder) == 99
    (folder / "config.json").unlink()
    assert max_positions(folder) is None


def test_interrupts_and_our_own_errors_pass() -> None:
    own = TargetError("a", "b", "c")
    for error in (KeyboardInterrupt(), own):
        with pytest.raises(type(error)) as caught, Reading("x", "y"):
            raise error
        assert caught.value is error
