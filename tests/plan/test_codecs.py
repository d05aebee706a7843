import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec.spec import CodecSpec
from headrace.errors import PlanError
from headrace.plan.codecs import codec_size, default_codecs, framing_bytes
from headrace.record import SEGMENT_BYTES, Sample, make_record, segment_spans, segment_to_message
from headrace.store.journal import JOURNAL_DTYPE
from headrace.store.shard import INDEX_DTYPE

# Bytes of one token of Qwen3.6-27B's five taps.
SIZES = {
    "raw": 51_200,
    "lossless": 51_200 / 1.45,
    "fp8": 25_620,
    "rotated:4": 13_200,
    "rotated:2": 6_800,
    "latent:5120x8": 5_140,
    "latent:5120x4": 2_640,
    "latent:2560x8": 2_570,
    "latent:2560x4": 1_320,
    "latent:1536x6": 1_176,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_token_weighs_payload_and_scales(name: str) -> None:
    assert codec_size(name, 5, 5120).value == pytest.approx(SIZES[name])


def test_the_last_state_is_a_sixth_column() -> None:
    assert codec_size("raw", 6, 5120).value == 61_440
    assert codec_size("raw", 6, 2560).value == 30_720
    assert codec_size("raw", 5, 576, "float32").value == 11_520


@pytest.mark.parametrize("name", ["zip", "rotated:1", "rotated:9", "latent:0x4", "latent:25601x4", "latent:4", ""])
def test_a_codec_that_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(PlanError):
        codec_size(name, 5, 5120)


def test_only_what_the_codec_room_knows_is_available() -> None:
    with pytest.raises(PlanError, match="dtype"):
        codec_size("raw", 5, 5120, "int8")


@given(st.integers(1, 8), st.sampled_from([64, 576, 5120]), st.sampled_from([2, 3, 4, 5]))
def test_more_bits_weigh_more_and_all_weigh_less_than_raw(taps: int, hidden: int, bits: int) -> None:
    sizes = [codec_size(f"rotated:{b}", taps, hidden).value for b in (bits, bits + 1)]
    assert sizes[0] < sizes[1] < codec_size("raw", taps, hidden).value


def test_the_usual_codecs_are_compared_gentlest_first() -> None:
    codecs = [codec_size(name, 5, 5120) for name in default_codecs(5120)]
    assert [c.loss for c in codecs] == sorted(c.loss for c in codecs)


@pytest.mark.parametrize("num_tokens", [1, 90, 800])
@pytest.mark.parametrize("width", [5760, 51_200])
def test_framing_is_what_the_store_writes(num_tokens: int, width: int) -> None:
    ids = np.arange(num_tokens, dtype=np.int32)
    sample = Sample(0, bytes(16), ids, np.ones(num_tokens, np.uint8))
    spans = segment_spans(num_tokens, width)
    record = make_record(sample, spans, [bytes((b - a) * width) for a, b in spans], 1)
    rows = len(spans) * (INDEX_DTYPE.itemsize + JOURNAL_DTYPE.itemsize)
    written = sum(len(segment_to_message(s)) for s in record.segments) + rows
    planned = num_tokens * width + framing_bytes(1, num_tokens, width).value
    assert planned == pytest.approx(written, rel=1e-4, abs=64)
    assert max((b - a) * width for a, b in spans) <= SEGMENT_BYTES


def fitted(folder: Path, name: str = "latent", **parameters: Any) -> str:
    folder.mkdir(exist_ok=True)
    spec = CodecSpec(name, 0, 5, 64, "bfloat16", {"groups": [[64, 4]], "basis": "00", **parameters})
    (folder / "codec.json").write_text(json.dumps(spec.to_json()))
    return str(folder)


def test_a_fitted_codec_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = fitted(tmp_path / "codec", escape_share=0.01)
    size = codec_size(folder, 5, 64)
    assert size.name == f"latent:64 ({folder})"
    assert size.setting == folder
    assert size.num_features == 64
    assert size.value == pytest.approx(64 / 2 + 2 + 0.01 * (4 + 2 * 64))
    assert size.bytes_per_token.formula == "64 coordinates x 4 bits / 8 + 1 scales x 2 B + 1.0000% of tokens x 132 B"


def test_groups_of_different_bits_are_told(tmp_path: Path) -> None:
    size = codec_size(fitted(tmp_path / "codec", groups=[[60, 8], [40, 4]]), 5, 64)
    assert size.value == 60 + 20 + 2 * 2
    assert size.bytes_per_token.formula == "100 coordinates x 4 or 8 bits = 80 B + 2 scales x 2 B"


def test_a_fitted_rotation_has_its_folder_in_its_name(tmp_path: Path) -> None:
    folder = fitted(tmp_path / "codec", "rotated", groups=[[64, 4]] * 5)
    assert codec_size(folder, 5, 64).name == f"rotated ({folder})"


def test_a_folder_of_a_codecs_name_does_not_hide_the_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    assert codec_size("raw", 5, 64).value == 640


def test_a_codec_that_was_fitted_for_other_states_is_refused(tmp_path: Path) -> None:
    folder = fitted(tmp_path / "codec")
    for width in ((4, 64, "bfloat16"), (5, 32, "bfloat16"), (5, 64, "float32")):
        with pytest.raises(PlanError, match="was fitted for 5 taps of 64 in bfloat16"):
            codec_size(folder, *width)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"name": "zip", "version": 0, "num_taps": 5, "hidden_size": 64, "dtype": "bfloat16", "parameters": {}}',
        '{"name": "latent", "version": 0, "num_taps": 5, "hidden_size": 64, "dtype": "bfloat16", "parameters": null}',
        '{"name": "latent", "version": 0, "num_taps": 5, "hidden_size": 64, "dtype": "bfloat16", "parameters": []}',
        '{"name": "latent", "version": 0, "num_taps": "x", "hidden_size": [], "dtype": "bfloat16", "parameters": 5}',
    ],
)
def test_a_folder_without_a_codec_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "codec.json").write_text(content)
    with pytest.raises(PlanError):
        codec_size(str(tmp_path), 5, 64)


@pytest.mark.parametrize(
    "parameters",
    [
        {"groups": []},
        {"groups": 5},
        {"groups": [["x", 4]]},
        {"groups": [[0, 4]]},
        {"groups": [[64, 7]]},
        {"escape_share": "x"},
        {"escape_share": 2},
        {"escape_share": float("nan")},
    ],
)
def test_a_codec_whose_bytes_cannot_be_counted_is_refused(tmp_path: Path, parameters: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        codec_size(fitted(tmp_path / "codec", **parameters), 5, 64)


def test_the_home_of_nobody_is_no_codec() -> None:
    with pytest.raises(PlanError):
        codec_size("~nobody-of-that-name/codec", 5, 64)
