"""A basis lies beside what it encoded, and another is refused."""

from pathlib import Path

import pytest
import torch

from headrace.codec.basis import load_basis
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError
from tests.codec.ladder import HIDDEN, TAPS, latent, states


def test_a_basis_is_kept_by_its_digest(tmp_path: Path) -> None:
    codec = latent()
    assert codec.basis is not None
    digest = codec.basis.save(tmp_path)
    spec = CodecSpec("latent", 0, TAPS, HIDDEN, "bfloat16", {**codec.spec.parameters, "basis": digest})
    opened = open_codec(spec, tmp_path)
    own = states(5)
    assert opened.encode(own) == codec.encode(own)
    with pytest.raises(CodecError, match="digest"):
        load_basis(tmp_path, "0" * 32)
    with pytest.raises(CodecError, match="folder of a fitted basis"):
        open_codec(spec)
    (tmp_path / "basis.safetensors").unlink()
    with pytest.raises(CodecError, match="copy it from where"):
        open_codec(spec, tmp_path)


def test_a_basis_goes_to_another_device_as_a_whole() -> None:
    codec = latent()
    assert codec.basis is not None
    moved = codec.basis.to(torch.device("meta"))
    assert moved.projection_RW is not None
    assert {t.device.type for t in (moved.projection_RW, moved.inverse_rms_L, moved.offset_F)} == {"meta"}
    assert moved.told == codec.basis.told


def test_the_same_fit_has_the_same_bytes_and_digest(tmp_path: Path) -> None:
    basis = latent().basis
    assert basis is not None
    assert len({basis.to_bytes() for _ in range(50)}) == 1
    again = load_basis(tmp_path, basis.save(tmp_path))
    assert again.to_bytes() == basis.to_bytes()
    assert (again.told, again.escape_norm) == (basis.told, basis.escape_norm)
    assert again.projection_RW is not None
    assert basis.projection_RW is not None
    assert torch.equal(again.projection_RW, basis.projection_RW)
