"""A peer's samples on their way in: checked, resumed, taken once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import RunFolder
from headrace.errors import ConfigError, PrepareError
from headrace.interchange.incoming import Said, take_in
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.reader import StoreReader
from headrace.testing.tiny_target import save_tiny_target
from tests.interchange.runs import states_of


class Made:
    """A peer with random states: samples of 4 tokens, `times` says which."""

    kind = "made"
    num_slots, has_final, hidden_size, dtype = 2, False, 32, "float32"
    listed: tuple[int, ...] | None = None

    def __init__(self, times: tuple[int, ...] = (0, 1, 2, 3), stop_at: int | None = None) -> None:
        self.times, self.stop_at = times, stop_at

    def __len__(self) -> int:
        return len(self.times)

    def where(self, number: int) -> str:
        return f"made {number}"

    def sample(self, number: int) -> tuple[Any, Any]:
        ids = np.arange(4, dtype=np.int32) + 5 * (self.times[number] + 1)
        return ids, np.array([0, 0, 1, 1], np.uint8)

    def states(self, number: int) -> torch.Tensor:
        if number == self.stop_at:
            raise KeyboardInterrupt
        random = torch.Generator().manual_seed(self.times[number])
        return torch.randn(4, 2 + self.has_final, 32, generator=random)


def said(tiny: Path, **changes: Any) -> Said:
    return Said(**{"target": tiny, "taps": "zlab:0,2", "heldout_fraction": 0.0, **changes})


def test_samples_become_a_prepared_set_and_states(tiny: Path, tmp_path: Path) -> None:
    to = RunFolder(tmp_path)
    found = take_in(Made(), said(tiny), to, Silent())
    assert found["num_records"] == found["num_samples"] == 4
    prepared = PreparedSet.open(to.prepared)
    assert prepared.sample(2).input_ids.tolist() == [15, 16, 17, 18]
    assert prepared.trained_tokens.tolist() == [2, 2, 2, 2]
    reader = StoreReader(to.states)
    assert reader.manifest.prepared == prepared.fingerprint
    assert reader.manifest.target["num_blocks"] == 5
    assert reader.manifest.provenance["imported_from"] == "made"
    assert torch.equal(states_of(to)[prepared.sample_id(1)], Made().states(1))


def test_a_sample_that_occurs_twice_is_taken_once(tiny: Path, tmp_path: Path) -> None:
    found = take_in(Made((7, 1, 7, 2)), said(tiny), RunFolder(tmp_path), Silent())
    assert (found["num_samples"], found["num_duplicates"]) == (3, 1)


def test_an_interrupted_import_goes_on(tiny: Path, tmp_path: Path) -> None:
    to = RunFolder(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        take_in(Made(stop_at=2), said(tiny), to, Silent())
    assert StoreReader(to.states).num_records == 2
    asked: list[int] = []

    class Asked(Made):
        def states(self, number: int) -> torch.Tensor:
            asked.append(number)
            return super().states(number)

    found = take_in(Asked(), said(tiny), to, Silent())
    assert asked == [2, 3]
    assert found["num_records"] == 4


def test_another_import_into_the_same_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    to = RunFolder(tmp_path)
    take_in(Made(), said(tiny), to, Silent())
    with pytest.raises(ConfigError, match="taps"):
        take_in(Made(), said(tiny, taps="vllm:2,3"), to, Silent())
    with pytest.raises(ConfigError, match="ids"):
        take_in(Made((1, 2)), said(tiny), to, Silent())


def test_held_out_samples_are_chosen_by_their_prompt(tiny: Path, tmp_path: Path) -> None:
    take_in(Made(tuple(range(10))), said(tiny, heldout_fraction=0.5), RunFolder(tmp_path / "a"), Silent())
    take_in(Made(tuple(range(9, -1, -1))), said(tiny, heldout_fraction=0.5), RunFolder(tmp_path / "b"), Silent())
    a, b = (PreparedSet.open(tmp_path / name / "prepared") for name in "ab")
    assert 0 < a.heldout.sum() < 10
    assert a.heldout.tolist() == b.heldout.tolist()[::-1]


def test_a_last_state_may_be_dropped(tiny: Path, tmp_path: Path) -> None:
    class WithFinal(Made):
        has_final = True

    found = take_in(WithFinal(), said(tiny, final="drop"), RunFolder(tmp_path / "a"), Silent())
    assert found["taps"] == ["after_block:0", "after_block:2"]
    kept = take_in(WithFinal(), said(tiny, final="pre_norm"), RunFolder(tmp_path / "b"), Silent())
    assert kept["taps"] == ["after_block:0", "after_block:2", "final:pre_norm"]
    with pytest.raises(ConfigError, match="once"):
        take_in(WithFinal(), said(tiny, taps="vllm:1,5", final="pre_norm"), RunFolder(tmp_path / "c"), Silent())


def test_a_target_of_another_width_is_refused(tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", hidden_size=16)
    with pytest.raises(ConfigError, match="width 16"):
        take_in(Made(), said(other), RunFolder(tmp_path / "to"), Silent())
    assert not (tmp_path / "to").exists()


def test_a_multimodal_folder_gives_the_depth_width_and_quantisation_of_its_text_part(tmp_path: Path) -> None:
    nested = save_tiny_target(tmp_path / "nested", "qwen3_5")
    config = json.loads((nested / "config.json").read_text())
    assert "num_hidden_layers" not in config
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (nested / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    to = RunFolder(tmp_path / "to")
    found = take_in(Made(), said(nested, taps="vllm:1,5"), to, Silent())
    assert found["taps"] == ["after_block:0", "final:pre_norm"]  # the fifth block is the last
    target = StoreReader(to.states).manifest.target
    assert (target["num_blocks"], target["hidden_size"], target["vocab_size"]) == (5, 32, 64)
    assert target["architecture"] == "Qwen3_5ForConditionalGeneration"
    assert json.loads(target["quantisation"]) == quantised


def test_no_sample_is_an_error(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="at least one"):
        take_in(Made(()), said(tiny), RunFolder(tmp_path / "to"), Silent())
