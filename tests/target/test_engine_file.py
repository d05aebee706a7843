import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.codec.spec import short_spec
from headrace.errors import ConfigError
from headrace.target.engine_file import EngineFile


def engine_file(**changed: Any) -> EngineFile:
    """An engine of a target of four blocks, whose run has its taps in an order of its own."""
    own = EngineFile(
        url="http://127.0.0.1:8100",
        channel="/nowhere/s",
        model="tiny",
        model_folder="/models/tiny",
        taps=["after_block:0", "after_block:2", "final:pre_norm"],
        layer_ids=[1, 3, 5],
        num_states=3,
        hidden_size=8,
        encoded=[1, 0],
        codec=short_spec("raw", 2, 8, "float32").to_json(),
        basis=None,
        queue_bytes=1 << 20,
        engine="vllm",
        version="0.32.0",
        dtype="float32",
    )
    return dataclasses.replace(own, **changed)


def test_it_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = engine_file()
    path = written.write(tmp_path)
    assert EngineFile.read(tmp_path) == EngineFile.read(path) == written
    assert written.spec is not None
    assert written.spec.num_taps == 2
    assert engine_file(codec=None).spec is None


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_ids": [3, 1, 5]},  # as asked, not as vLLM hands them out
        {"layer_ids": [1, 1, 5]},
        {"taps": ["after_block:0", "after_block:2"]},
        {"encoded": [1, 3]},
        {"encoded": [1]},
    ],
)
def test_columns_that_do_not_fit_their_names_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    engine_file(**changed).write(tmp_path)
    with pytest.raises(ConfigError, match="ascending columns"):
        EngineFile.read(tmp_path)


def test_an_absent_or_foreign_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.json"):
        EngineFile.read(tmp_path)
    (tmp_path / "engine.json").write_text('{"url": 1}')
    with pytest.raises(ConfigError, match="an engine's description"):
        EngineFile.read(tmp_path)
