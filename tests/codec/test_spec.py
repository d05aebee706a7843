"""Sizes and names of codecs, without torch."""

import json

import pytest

from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError


def test_raw_weighs_two_bytes_a_number() -> None:
    spec = CodecSpec("raw", 0, num_taps=5, hidden_size=5120, dtype="bfloat16")
    assert spec.bytes_per_token() == 51_200


def test_a_spec_survives_the_manifest() -> None:
    spec = CodecSpec("raw", 0, 5, 576, "float32", {"note": 1})
    assert CodecSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="latent"):
        CodecSpec("latent", 0, 5, 576, "bfloat16").bytes_per_token()
