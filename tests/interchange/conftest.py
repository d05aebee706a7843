from pathlib import Path

import pytest
import torch

from headrace.config import RunFolder
from headrace.testing.tiny_target import save_tiny_target
from tests.interchange.runs import captured


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """bfloat16 states at two taps, the last state before the final norm; read only."""
    return captured(tiny, tmp_path_factory.mktemp("runs") / "final")


@pytest.fixture(scope="session")
def run_without_final(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return captured(tiny, tmp_path_factory.mktemp("runs") / "plain", final_state=False)


@pytest.fixture(scope="session")
def run_normed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The last state after the final norm."""
    taps = ("after_block:0", "after_block:2", "final:post_norm")
    return captured(tiny, tmp_path_factory.mktemp("runs") / "normed", taps=taps, final_state=False)
