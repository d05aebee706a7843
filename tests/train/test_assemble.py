import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from headrace.config import DrafterConfig, RunFile
from headrace.drafter.stock import load_stock
from headrace.errors import DrafterError, TrainError
from headrace.export.zlab import export_zlab
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.assemble import _mask_token, assemble, special_ids
from tests.train.runs import MASK_TOKEN_ID, TAPS, drafts, make_run, run_file, write_set


def test_the_parts_belong_together(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    parts = assemble(run_file(tmp_path, tiny_target), folder, features=True)
    assert parts.shape.taps == tuple(TAPS)
    assert parts.shape.num_features == 64
    assert parts.shape.mask_token_id == MASK_TOKEN_ID
    assert parts.head.embedding_VH.dtype == torch.float32
    drafter = parts.new_drafter(0)
    assert drafter.feature_scale[0] > 5 * drafter.feature_scale[-1]
    parts.close()


def test_states_of_another_prepared_set_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    write_set(folder.prepared, drafts(14, 2), fingerprint="noise-2")
    with pytest.raises(TrainError, match="prepared set noise-2"):
        assemble(run_file(tmp_path, tiny_target), folder, features=True)


def test_the_head_of_another_target_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    other = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(TrainError, match="head of the target"):
        assemble(run_file(tmp_path, other), folder, features=True)


def test_the_floor_opens_no_store(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    with_states = assemble(run_file(tmp_path, tiny_target), folder, features=True)
    with_states.close()
    shutil.rmtree(folder.states)
    parts = assemble(run_file(tmp_path, tiny_target), folder, features=False)
    assert parts.source is None
    assert not parts.shape.features
    assert parts.shape.num_features == with_states.shape.num_features
    assert parts.shape.taps == with_states.shape.taps
    assert torch.equal(parts.new_drafter(0).feature_scale, torch.ones(64))


def test_special_ids_come_from_every_place_that_names_them(tmp_path: Path, tiny_target: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_target)
    assert special_ids(tiny_target, config) == {"mask": [], "pad": [0], "eos": [2], "bos": [1]}
    config.eos_token_id = [2, 7]
    assert special_ids(tiny_target, config)["eos"] == [2, 7]


@pytest.mark.parametrize("mask", [0, 1, 2])
def test_a_mask_token_that_means_something_is_refused(tmp_path: Path, tiny_target: Path, mask: int) -> None:
    folder = make_run(tmp_path, tiny_target)
    cfg = run_file(tmp_path, tiny_target)
    cfg = cfg.model_copy(update={"drafter": cfg.drafter.model_copy(update={"mask_token_id": mask})})
    with pytest.raises(DrafterError, match="mask token"):
        assemble(cfg, folder, features=False)


def test_the_demo_has_its_own_mask_token() -> None:
    assert _mask_token(RunFile()) == 16
    assert _mask_token(RunFile.model_validate({"target": {"model": "elsewhere"}})) is None


def test_every_setting_that_decides_is_part_of_the_identity(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    parts = assemble(run_file(tmp_path, tiny_target), folder, features=False)
    assert {"train.lr", "train.seed", "order.seed", "shape", "prepared", "target"} <= set(parts.identity)
    assert not {"train.threads", "train.save_seconds", "train.tensorboard", "train.read_ahead"} & set(parts.identity)


@pytest.mark.parametrize("fast", [True, False])
def test_autocast_is_used_where_the_device_is_fast_in_bfloat16(
    tmp_path: Path, tiny_target: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.train.assemble.fast_bfloat16", lambda device: fast)
    folder = make_run(tmp_path, tiny_target)
    parts = assemble(run_file(tmp_path, tiny_target, autocast=None), folder, True)
    assert parts.train.autocast is fast
    assert parts.identity["train.autocast"] is fast
    assert parts.head.head_VH.dtype == (torch.bfloat16 if fast else torch.float32)
    parts.close()


def test_an_objective_that_needs_last_states_is_refused_without_them(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    for features in (True, False):
        with pytest.raises(TrainError, match=r"capture\.final_state"):
            assemble(run_file(tmp_path, tiny_target, objective="kl"), folder, features)


@pytest.mark.parametrize("scaled", [True, False])
def test_taps_are_scaled_unless_told_otherwise(tmp_path: Path, tiny_target: Path, scaled: bool) -> None:
    folder = make_run(tmp_path, tiny_target)
    parts = assemble(run_file(tmp_path, tiny_target, scale_taps=scaled), folder, True)
    scale_F = parts.new_drafter(0).feature_scale
    parts.close()
    assert bool((scale_F == 1).all()) is not scaled
    assert parts.identity["train.scale_taps"] is scaled


def test_a_run_goes_on_from_another_drafter(tmp_path: Path, tiny_target: Path) -> None:
    folder = make_run(tmp_path, tiny_target)
    cfg = run_file(tmp_path, tiny_target)
    first = assemble(cfg, folder, True)
    export_zlab(first.new_drafter(3), tmp_path / "before")
    first.close()
    own = {"init_from": str(tmp_path / "before")}
    parts = assemble(cfg.model_copy(update={"drafter": DrafterConfig.model_validate(own)}), folder, True)
    assert parts.shape == first.shape
    assert parts.identity["drafter.init_from"] != ""
    again = parts.new_drafter(0)
    parts.close()
    served = load_stock(tmp_path / "before")
    torch.testing.assert_close(again.fc.weight * again.feature_scale, served.fc.weight)
    assert torch.equal(again.norm.weight, served.norm.weight)
    wrong = DrafterConfig.model_validate({**own, "mask_token_id": MASK_TOKEN_ID - 1})
    with pytest.raises(DrafterError, match=r"drafter\.mask_token_id"):
        assemble(cfg.model_copy(update={"drafter": wrong}), folder, True)


def test_a_mask_token_is_the_first_row_that_no_text_produces(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "padded", vocab_size=72)
    folder = make_run(tmp_path / "run", target)
    cfg = run_file(tmp_path / "run", target)
    cfg = cfg.model_copy(update={"drafter": cfg.drafter.model_copy(update={"mask_token_id": None})})
    parts = assemble(cfg, folder, False)
    assert parts.shape.mask_token_id == 64
    assert any(reason.startswith("drafter.mask_token_id 64: a row") for reason in parts.reasons)
