from pathlib import Path

import pytest
import torch

from headrace.config import RunFolder
from headrace.errors import TrainError
from headrace.progress import Silent
from headrace.train.checkpoint import load_checkpoint
from headrace.train.load import load_drafter
from headrace.train.loop import train
from tests.train.runs import CODEC, make_run, run_file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> RunFolder:
    root = tmp_path_factory.mktemp("trained")
    folder = make_run(root, tiny_target)
    train(run_file(root, tiny_target, max_steps=2), folder, True, Silent())
    return folder


def test_a_trained_drafter_comes_back(trained: RunFolder) -> None:
    drafter, extras = load_drafter(trained.train() / "last")
    weights = load_checkpoint(trained.train() / "last").weights
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())
    assert not drafter.training
    assert extras["step"] == 2
    assert extras["codec"] == CODEC.spec.to_json()
    assert extras["features"] is True
    assert extras["prepared"] == "noise-1"
    assert set(extras["target"]) == {"model", "weights_hash"}


def test_an_absent_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="best"):
        load_drafter(tmp_path / "best")
