from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.prepare.prepared import PreparedSet
from headrace.testing.tiny_target import save_tiny_target
from tests.train.runs import drafts, write_set


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """14 rows, of which the last two are held out."""
    return write_set(tmp_path_factory.mktemp("prepared"), drafts(14, 2))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
