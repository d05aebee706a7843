from dataclasses import replace
from pathlib import Path

import pytest

from headrace.codec.spec import CodecSpec
from headrace.errors import StoreError
from headrace.store.manifest import FILE_NAME, TARGET_IDENTITY, Manifest, make_manifest
from headrace.testing.states import TARGET, fake_manifest


def test_a_manifest_is_read_back_as_written(tmp_path: Path) -> None:
    manifest = fake_manifest()
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_every_bit_flip_is_noticed(tmp_path: Path) -> None:
    fake_manifest().write(tmp_path)
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError):
            Manifest.read(tmp_path)


def test_an_absent_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="run capture first"):
        Manifest.read(tmp_path)


CHANGES = {
    "taps": {"taps": ("after_block:0", "after_block:1")},
    "norms": {"norms": ("none", "final")},
    "dtype": {"dtype": "bfloat16"},
    "codec.name": {"codec": CodecSpec("linear", 0, 2, 8, "float32")},
    "codec.parameters": {"codec": CodecSpec("raw", 0, 2, 8, "float32", {"bits": 4})},
    "prepared": {"prepared": "another"},
    "token_rule": {"token_rule": "trained"},
    **{f"target.{name}": {"target": {**fake_manifest().target, name: "other"}} for name in TARGET_IDENTITY},
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_identity_is_refused_and_the_field_named(field: str) -> None:
    manifest = fake_manifest()
    with pytest.raises(StoreError, match=field.replace(".", r"\.")):
        manifest.compare(replace(manifest, **CHANGES[field]))


def test_provenance_alone_does_not_refuse_but_is_told() -> None:
    a, b = (
        fake_manifest(),
        make_manifest({**TARGET, "engine_version": "9"}, ["after_block:0"], CODEC, "p", {"gpu": "x"}),
    )
    same = replace(a, provenance=b.provenance)
    a.compare(same)
    assert a.provenance_changes(same) == ["engine_version was '0' and is now '9'", "gpu was None and is now 'x'"]
    assert a.provenance_changes(replace(a, provenance={**a.provenance, "created": "later"})) == []


CODEC = CodecSpec("raw", 0, 1, 8, "float32")


def test_norms_follow_from_the_names_of_taps() -> None:
    manifest = make_manifest(TARGET, ["embedding", "final:pre_norm", "final:post_norm"], CODEC, "p", {})
    assert manifest.norms == ("none", "none", "final")


def test_a_target_without_its_hashes_is_refused() -> None:
    with pytest.raises(StoreError, match="weights_hash"):
        make_manifest({k: v for k, v in TARGET.items() if k != "weights_hash"}, ["embedding"], CODEC, "p", {})


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.store.manifest.VERSION", 99)
    fake_manifest().write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 99"):
        Manifest.read(tmp_path)
