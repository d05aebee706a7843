import json
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.plan.basis import read_basis
from headrace.plan.inputs import Measurement, make_inputs
from tests.plan.models import LLAMA, published, the_data_set

SMALL = {"model": "demo", "num_samples": 10, "mean_tokens": 100.0}


def test_what_was_assumed_is_noted(tmp_path: Path) -> None:
    notes = " ".join(read_basis(the_data_set(tmp_path)).notes)
    assert "z-lab" in notes
    assert "500 answer tokens give 499" in notes
    assert "no GPU was named" in notes
    assert "decode time is left out" in " ".join(read_basis(make_inputs(**SMALL)).notes)


def test_one_set_of_gpus_does_both() -> None:
    basis = read_basis(make_inputs(**SMALL, capture_gpu="b200"))
    assert basis.train is None
    assert read_basis(make_inputs(**SMALL, train_gpu="b200:8")).capture.count == 8
    both = read_basis(make_inputs(**SMALL, capture_gpu="b200", train_gpu="l40s:4"))
    assert both.train is not None
    assert both.train.count == 4


def test_measured_rates_need_no_gpu_of_the_catalogue() -> None:
    measured = Measurement(machine="this machine", date="2026-11-30", capture_tokens_s=10)
    basis = read_basis(make_inputs(**SMALL, measured=measured))
    assert basis.capture.gpu is None
    assert any("measured on this machine" in note for note in basis.notes)


def test_plain_numbers_do_without_a_config() -> None:
    given = {"hidden_size": 5120, "num_blocks": 64, "params_billion": 27, "num_samples": 10, "mean_tokens": 100}
    assert read_basis(make_inputs(**given)).target.hidden_size == 5120


def test_a_published_drafter_brings_its_taps() -> None:
    config = published("derived/Qwen3.6-27B.from-NVFP4.json")
    drafter = published("drafts/specforge/qwen3.6-27b-dflash.json")
    basis = read_basis(make_inputs(model=str(config), drafter=drafter, num_samples=10, mean_tokens=800))
    assert [t.block for t in basis.taps] == [1, 16, 31, 46, 61]
    assert basis.drafter.num_heads == 32


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "dflash_config": {}, "block_size": 8}), encoding="utf-8")
    with pytest.raises(PlanError, match="hidden size 576"):
        read_basis(make_inputs(**SMALL, drafter=path))


def test_chats_carry_the_note_that_they_are_an_estimate(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "hello there", "response": "good day to you"}\n', encoding="utf-8")
    basis = read_basis(make_inputs(model="demo", chats=path))
    assert any("estimate" in note for note in basis.notes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "--model"),
        ({"num_samples": None}, "--samples"),
        ({"num_samples": 0}, "at least one sample"),
        ({"mean_tokens": None}, "--mean-tokens"),
        ({"prepared": Path("x")}, "prepared, num_samples"),
        ({"taps": ["30"]}, "from -1 to 29"),
        ({"capture_gpu": "gtx-970"}, "rtx-pro-6000"),
        ({"model": "/no/such/config.json"}, "no /no/such"),
    ],
)
def test_bad_input_says_what_is_known(given: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_basis(make_inputs(**{**SMALL, **given}))
