"""Codecs by name or folder."""

from pathlib import Path

import pytest

from headrace.codec.basis import FILE_NAME
from headrace.codec.registry import chosen_spec, copy_basis, open_codec, save_codec
from headrace.codec.spec import SPEC_NAME, CodecSpec, short_spec
from headrace.errors import CodecError
from tests.codec.ladder import HIDDEN, TAPS, latent, states


def saved(folder: Path) -> CodecSpec:
    codec = latent()
    assert codec.basis is not None
    return save_codec(codec.spec, codec.basis, folder)


def test_a_fitted_codec_is_chosen_by_its_folder(tmp_path: Path) -> None:
    spec = saved(tmp_path / "codec")
    found, folder = chosen_spec(str(tmp_path / "codec"), TAPS, HIDDEN, "bfloat16")
    assert found == spec
    assert folder == tmp_path / "codec"
    own = states(4)
    assert open_codec(found, folder).encode(own) == latent().encode(own)


def test_a_codec_of_other_states_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "codec")
    with pytest.raises(CodecError, match="fit it on states of this run"):
        chosen_spec(str(tmp_path / "codec"), TAPS + 1, HIDDEN, "bfloat16")


@pytest.mark.parametrize("content", [None, "", "[]", '{"name": 1}'])
def test_a_folder_without_a_codec_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / SPEC_NAME).write_text(content)
    with pytest.raises(CodecError, match="headrace codec fit"):
        chosen_spec(str(tmp_path), TAPS, HIDDEN, "bfloat16")


def test_a_short_name_beats_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    assert chosen_spec("raw", TAPS, HIDDEN, "bfloat16")[0].name == "raw"
    for unknown in ("zip", "~nobody/x", str(tmp_path / "none"), "rotated:7", "latent:4x4:2"):
        with pytest.raises(CodecError):
            chosen_spec(unknown, TAPS, HIDDEN, "bfloat16")


def test_a_basis_is_copied_once_and_checked(tmp_path: Path) -> None:
    spec = saved(tmp_path / "codec")
    to = tmp_path / "states"
    to.mkdir()
    for _ in range(2):
        copy_basis(spec, tmp_path / "codec", to)
    assert (to / FILE_NAME).read_bytes() == (tmp_path / "codec" / FILE_NAME).read_bytes()
    (to / FILE_NAME).write_bytes(b"other")
    with pytest.raises(CodecError, match="digest"):
        copy_basis(spec, tmp_path / "codec", to)
    copy_basis(short_spec("raw", TAPS, HIDDEN, "bfloat16"), None, tmp_path / "nowhere")


def test_a_latent_without_its_basis_is_refused() -> None:
    with pytest.raises(CodecError, match="headrace codec fit"):
        open_codec(short_spec("latent:8x4", TAPS, HIDDEN, "bfloat16"))
