"""A run whose codec is a latent by name fits it on a raw slice first; `auto` takes the gentlest codec that fits."""

from pathlib import Path
from typing import Any

import pytest

from headrace.capture.capture import capture
from headrace.codec.registry import open_codec
from headrace.codec.spec import auto_ladder, short_spec
from headrace.config import RunFile, RunFolder, TargetConfig
from headrace.errors import ConfigError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.raw_slice import capture_slice, with_codec
from headrace.store.budget import expected_bytes
from headrace.store.reader import StoreReader
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.tiny_target import save_tiny_target
from tests.capture.conftest import make_cfg, write_set

LENGTHS = [16, 12, 14, 16, 11, 16, 9, 16, 13, 16, 15, 16]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def target(tiny: Path) -> TransformersTarget:
    return load_target(TargetConfig(model=str(tiny), dtype="bfloat16", device="cpu"))


def run(tmp_path: Path, tiny: Path, max_bytes: int | None = None, **capture: Any) -> tuple[RunFile, RunFolder]:
    cfg = make_cfg(tiny, tmp_path / "run")
    own = cfg.capture.model_copy(update=capture)
    cfg = cfg.model_copy(update={"capture": own, "store": cfg.store.model_copy(update={"max_bytes": max_bytes})})
    folder = RunFolder(Path(cfg.run))
    write_set(folder.prepared, LENGTHS, trained=True)
    return cfg, folder


def test_a_slice_holds_raw_states_of_training_and_held_out_rows(
    tmp_path: Path, tiny: Path, target: TransformersTarget
) -> None:
    cfg, folder = run(tmp_path, tiny, codec="fp8")
    part = capture_slice(cfg, folder, target, 60, Silent())
    prepared, reader = PreparedSet.open(part.prepared), StoreReader(part.states)
    assert reader.manifest.codec.name == "raw"
    assert reader.num_records == prepared.num_samples < len(LENGTHS)
    assert 0 < prepared.heldout.sum() < prepared.num_samples
    assert 60 <= int(prepared.lengths[~prepared.heldout].sum()) < 60 + 16
    assert capture_slice(cfg, folder, target, 60, Silent()).root == part.root
    prepared_set = PreparedSet.open(folder.prepared)
    assert reader.manifest.prepared != prepared_set.fingerprint  # never taken for the run's own


def test_a_latent_by_name_is_fitted_once_and_the_run_is_captured_with_it(
    tmp_path: Path, tiny: Path, target: TransformersTarget
) -> None:
    cfg, folder = run(tmp_path, tiny, codec="latent:16x4", fit_tokens=100)
    asked = 0

    def give() -> TransformersTarget:
        nonlocal asked
        asked += 1
        return target

    chosen = with_codec(cfg, folder, give, Silent())
    assert chosen.capture.codec == str(folder.root / "codec")
    assert not (folder.root / "slice").exists()
    assert asked == 1
    assert with_codec(cfg, folder, give, Silent()) == chosen
    assert asked == 1  # fitted once
    summary = capture(chosen, folder, target, Silent())
    codec = open_codec(StoreReader(folder.states).manifest.codec, folder.states)
    assert codec.num_features == 16
    assert summary["bytes_stored"] < summary["bytes_raw"] * 2
    other = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"codec": "latent:8x4"})})
    with pytest.raises(ConfigError, match="codec"):
        with_codec(other, folder, give, Silent())


def test_a_killed_fit_goes_on(
    tmp_path: Path, tiny: Path, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, folder = run(tmp_path, tiny, codec="latent:16x4", fit_tokens=100)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.raw_slice.fit_codec", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            with_codec(cfg, folder, lambda: target, Silent())
    assert with_codec(cfg, folder, lambda: target, Silent()).capture.codec == str(folder.root / "codec")


def test_other_codecs_are_left_as_they_are(tmp_path: Path, tiny: Path, target: TransformersTarget) -> None:
    for name in ("raw", "fp8", "rotated:4", str(tmp_path)):
        cfg, folder = run(tmp_path, tiny, codec=name)
        assert with_codec(cfg, folder, lambda: target, Silent()) is cfg


@pytest.mark.parametrize("less", [0, 1, None])
def test_auto_is_the_gentlest_that_fits(
    tmp_path: Path, tiny: Path, target: TransformersTarget, less: int | None
) -> None:
    spec = short_spec("raw", 2, target.spec.hidden_size, "bfloat16")
    raw_bytes = expected_bytes(LENGTHS, spec.bytes_per_token())
    cfg, folder = run(tmp_path, tiny, 1000 if less is None else int(raw_bytes * (1.02 - 0.03 * less)), codec="auto")
    if less is None:
        with pytest.raises(ConfigError, match=r"store\.max_bytes"):
            with_codec(cfg, folder, lambda: target, Silent())
        return
    chosen = with_codec(cfg, folder, lambda: target, Silent())
    assert chosen.capture.codec == ("raw" if less == 0 else "lossless")
    capture(chosen, folder, target, Silent())


def test_auto_needs_a_budget(tmp_path: Path, tiny: Path, target: TransformersTarget) -> None:
    cfg, folder = run(tmp_path, tiny, codec="auto")
    with pytest.raises(ConfigError, match=r"store\.max_bytes"):
        with_codec(cfg, folder, lambda: target, Silent())


def test_the_ladder_ends_at_a_hundredth_and_names_only_what_is_known() -> None:
    assert auto_ladder(5120)[0] == "raw"
    assert auto_ladder(5120)[-1] == "latent:640x4"
