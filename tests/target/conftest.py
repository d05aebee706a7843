from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.config import TargetConfig
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.tiny_target import save_tiny_target

LoadTiny = Callable[..., TransformersTarget]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny targets of each layout."""
    root = tmp_path_factory.mktemp("targets")
    return {
        "llama": save_tiny_target(root / "llama"),
        "llama-untied": save_tiny_target(root / "llama-untied", tied=False),
        "qwen3": save_tiny_target(root / "qwen3", "qwen3"),
        "qwen3-sharded": save_tiny_target(root / "qwen3-sharded", "qwen3", tied=False, max_shard_size="20KB"),
    }


@pytest.fixture
def load_tiny(folders: dict[str, Path]) -> LoadTiny:
    def load(name: str = "llama", dtype: str = "float32") -> TransformersTarget:
        return load_target(TargetConfig(model=str(folders[name]), dtype=dtype, device="cpu"))

    return load
