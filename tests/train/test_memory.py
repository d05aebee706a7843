"""The estimate follows the settings it names, and a run that cannot fit is refused before its first step."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from headrace.config import DrafterConfig, TrainConfig
from headrace.drafter.derive import derive_shape
from headrace.drafter.shape import DrafterShape
from headrace.errors import TrainError
from headrace.train import memory
from headrace.train.memory import check_memory, needs
from tests.train.runs import CODEC, TAPS

CPU = torch.device("cpu")


@pytest.fixture
def shape(tiny_target: Path) -> DrafterShape:
    cfg = DrafterConfig(num_layers=1, block_size=4, mask_token_id=63)
    return derive_shape(cfg, AutoConfig.from_pretrained(tiny_target), TAPS, CODEC.num_features, {})


@pytest.mark.parametrize("setting", ["micro_tokens", "group_blocks", "read_ahead", "replay_steps", "step_tokens"])
def test_each_setting_that_is_named_makes_its_need_grow(shape: DrafterShape, setting: str) -> None:
    base = TrainConfig(draws=1 if setting == "step_tokens" else 2, micro_tokens=1000, step_tokens=4000)
    more = base.model_copy(update={setting: getattr(base, setting) * 4})
    for small, large in zip(needs(shape, base, 1000, 100), needs(shape, more, 1000, 100), strict=True):
        named = small.setting == f"train.{setting}" or (setting == "step_tokens" and "steps" in small.what)
        assert (large.num_bytes > small.num_bytes) == named, small.what


def test_anchors_do_not_matter(shape: DrafterShape) -> None:
    few, many = (needs(shape, TrainConfig(anchors=n), 1000, 100) for n in (64, 512))
    assert few == many


def test_a_run_that_does_not_fit_is_refused_and_says_what_to_lower(
    shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2e9)
    assert "GB on the host" in check_memory(needs(shape, TrainConfig(), 1000, 100), CPU)
    greedy = TrainConfig(read_ahead=10**7)
    with pytest.raises(TrainError, match=r"lower train\.read_ahead"):
        check_memory(needs(shape, greedy, 1000, 100), CPU)


def test_device_and_host_are_looked_at_apart(shape: DrafterShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1e12 if device.type == "cpu" else 1e3)
    with pytest.raises(TrainError, match="memory on cuda"):
        check_memory(needs(shape, TrainConfig(), 1000, 100), torch.device("cuda"))
