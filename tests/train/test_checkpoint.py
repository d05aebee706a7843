import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from headrace.errors import TrainError
from headrace.train import checkpoint as module
from headrace.train.checkpoint import (
    Checkpoint,
    RunState,
    last_checkpoint,
    load_checkpoint,
    mend_links,
    remove_strays,
    save_checkpoint,
)


def made(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weights = {"fc.weight": torch.randn(3, 4, generator=generator)}
    moments = {"fc.weight/exp_avg": torch.randn(3, 4, generator=generator), "fc.weight/step": torch.tensor(float(step))}
    state = RunState(step, 1, 7, 40, True, 1.5, 1.75, 900, 12.5, {3: "too long"}, {"features": True})
    return Checkpoint(weights, moments, state)


def equal(a: Checkpoint, b: Checkpoint) -> bool:
    return (
        a.state == b.state
        and a.weights.keys() == b.weights.keys()
        and all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)
        and a.moments.keys() == b.moments.keys()
        and all(torch.equal(a.moments[k], b.moments[k]) for k in a.moments)
    )


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, made(5), best=False)
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert equal(load_checkpoint(last), made(5))
    assert load_checkpoint(tmp_path / "last", with_moments=False).moments == {}


def test_last_and_best_are_kept_and_others_removed(tmp_path: Path) -> None:
    for step, best in ((1, True), (2, False), (3, True), (4, False), (5, False)):
        save_checkpoint(tmp_path, made(step), best)
    assert load_checkpoint(tmp_path / "last").state.step == 5
    assert load_checkpoint(tmp_path / "best").state.step == 3
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000005"]


def test_a_folder_without_checkpoints_has_no_last(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None


def two(folder: Path) -> None:
    save_checkpoint(folder, made(3), best=True)
    save_checkpoint(folder, made(5), best=False)


def test_links_that_a_copy_lost_are_made_again_and_nothing_is_removed(tmp_path: Path) -> None:
    two(tmp_path)
    for name in ("last", "best"):
        (tmp_path / name).unlink()
    remove_strays(tmp_path)
    assert "step-00000005" in mend_links(tmp_path)[0]
    assert equal(load_checkpoint(tmp_path / "last"), made(5))
    assert (tmp_path / "step-00000003").is_dir()


def test_links_that_a_copy_made_folders_of_are_links_again(tmp_path: Path) -> None:
    two(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=False)
    assert len(mend_links(tmp_path / "b")) == 2
    assert equal(load_checkpoint(last_checkpoint(tmp_path / "b") or tmp_path), made(5))
    assert (tmp_path / "b" / "best").readlink().name == "step-00000003"
    remove_strays(tmp_path / "b")
    save_checkpoint(tmp_path / "b", made(6), best=True)
    assert sorted(p.name for p in (tmp_path / "b").glob("step-*")) == ["step-00000006"]
    assert mend_links(tmp_path / "b") == []


def test_a_dangling_link_falls_back_to_the_newest_sound_checkpoint(tmp_path: Path) -> None:
    two(tmp_path)
    shutil.rmtree(tmp_path / "step-00000005")
    mend_links(tmp_path)
    assert equal(load_checkpoint(tmp_path / "last"), made(3))
    (tmp_path / "last").unlink()
    (tmp_path / "step-00000003" / "state.json").write_text("[]")
    with pytest.raises(TrainError, match="only damaged ones"):
        mend_links(tmp_path)
    assert (tmp_path / "step-00000003").is_dir()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"5", b"\xff", b'{"digests": {}}'])
def test_a_damaged_state_is_an_error(tmp_path: Path, content: bytes) -> None:
    folder = save_checkpoint(tmp_path, made(1), best=True)
    (folder / "state.json").write_bytes(content)
    with pytest.raises(TrainError, match="a checkpoint"):
        load_checkpoint(folder)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", range(10))
def test_a_save_that_dies_anywhere_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save_checkpoint(tmp_path, made(1), best=True)
    calls = 0

    def dying(real: object) -> object:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise Killed
            return real(*args, **kwargs)  # type: ignore[operator]

        return run

    for name in ("save_file", "_sync_and_digest", "write_atomic", "fsync_folder", "_point"):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    monkeypatch.setattr(os, "rename", dying(os.rename))
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, made(2), best=True)
    monkeypatch.undo()
    remove_strays(tmp_path)
    for link in ("last", "best"):
        found = load_checkpoint(tmp_path / link)
        assert equal(found, made(found.state.step))
    save_checkpoint(tmp_path, made(2), best=True)
    assert load_checkpoint(tmp_path / "best").state.step == 2
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002"]


def test_a_half_saved_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, made(1), best=False)
    (tmp_path / "step-00000009.tmp").mkdir()
    (tmp_path / "step-00000009.tmp" / "model.safetensors").write_bytes(b"half")
    assert load_checkpoint(tmp_path / "last").state.step == 1
    remove_strays(tmp_path)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str, place: int) -> None:
    folder = save_checkpoint(tmp_path, made(1), best=False)
    content = bytearray((folder / name).read_bytes())
    content[place] ^= 4
    (folder / name).write_bytes(content)
    with pytest.raises(TrainError, match=name):
        load_checkpoint(tmp_path / "last")


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, made(1), best=False)
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(TrainError, match="optimizer"):
        load_checkpoint(folder)
    value = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**value, "format": "headrace-checkpoint-9"}))
    with pytest.raises(TrainError, match="headrace-checkpoint-9"):
        load_checkpoint(folder, with_moments=False)
