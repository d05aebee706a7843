from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config import RunFile, RunFolder, TargetConfig
from headrace.prepare.prepared import Draft, write_prepared
from headrace.record import sample_id
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.tiny_target import save_tiny_target

# length kit: one token, around a block, around a window's groups
LENGTHS = (1, 2, 7, 8, 9, 16, 5, 12, 3, 16, 4, 11)
RUN = {
    "order": {"window_samples": 5},
    "capture": {"group_tokens": 40},
    "regenerate": {"max_new_tokens": 6, "batch_size": 2},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", "qwen3")


@pytest.fixture
def target(tiny_folder: Path) -> TransformersTarget:
    return load_target(TargetConfig(model=str(tiny_folder), dtype="bfloat16", device="cpu"))


@pytest.fixture
def cfg(tiny_folder: Path, tmp_path: Path) -> RunFile:
    return make_cfg(tiny_folder, tmp_path / "run")


@pytest.fixture
def folder(cfg: RunFile) -> RunFolder:
    """A run folder with a prepared set and a prompts set of the same ids."""
    folder = RunFolder(Path(cfg.run))
    write_set(folder.prepared, LENGTHS, trained=True)
    write_set(folder.prompts, LENGTHS, trained=False)
    return folder


def make_cfg(tiny_folder: Path, run: Path) -> RunFile:
    target = {"model": str(tiny_folder), "dtype": "bfloat16", "taps": ["after_block:0", "after_block:2"]}
    return RunFile.model_validate({"run": str(run), "target": target, **RUN})


def write_set(folder: Path, lengths: Sequence[int], trained: bool) -> None:
    drafts = []
    for row, size in enumerate(lengths):
        ids = np.random.default_rng(row).integers(3, 64, size).astype(np.int32)
        mask = (np.arange(size) >= size // 2).astype(np.uint8) if trained else np.zeros(size, np.uint8)
        messages = f'[{{"role": "user", "content": "{row}"}}]'
        drafts.append(Draft(sample_id(ids, mask), ids, mask, "kind", heldout=row % 4 == 0, messages=messages))
    write_prepared(folder, drafts, {"fingerprint": f"set of {len(lengths)}"})
