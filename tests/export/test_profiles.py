"""Keys of an export beside what engines are known to read."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.drafter.stock import stock_config
from headrace.errors import ExportError
from headrace.export.profiles import PROFILES, environment, problems, profile
from tests.evaluate.conftest import shape

MIXED = replace(shape(), layer_types=("sliding_attention", "full_attention"), sliding_window=16)


def config(of: Any = None, **scales: float) -> dict[str, Any]:
    return stock_config(of or shape(), {"eos_token_id": 2}, scales)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_plain_drafter_is_served_as_it_was_trained(name: str) -> None:
    assert problems(config(), profile(name)) == []
    assert environment(config(), profile(name)) == {}


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_key_that_no_profile_knows_is_refused(name: str) -> None:
    with pytest.raises(ExportError, match="norm_before_fc"):
        problems(config() | {"norm_before_fc": True}, profile(name))
    inner = config()
    inner["dflash_config"]["selector_rank"] = 256
    with pytest.raises(ExportError, match=r"dflash_config\.selector_rank"):
        problems(inner, profile(name))


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_scale_of_embeddings_that_is_not_read_is_said(name: str) -> None:
    assert "input_embedding_scale" in problems(config(input_embedding_scale=5.0), profile(name))[0]
    assert problems(config(output_multiplier=0.5, final_logit_softcapping=30.0), profile(name)) == []


def test_windows_run_in_vllm_with_its_second_runner_and_causally_in_sglang() -> None:
    assert problems(config(MIXED), PROFILES["vllm"]) == []
    assert environment(config(MIXED), PROFILES["vllm"]) == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert "causally" in problems(config(MIXED), PROFILES["sglang"])[0]
    assert problems(config(replace(MIXED, sliding_causal=True)), PROFILES["sglang"]) == []


def test_a_reduced_vocabulary_is_for_vllm_alone() -> None:
    small = config(replace(shape(), draft_vocab_size=20, draft_vocab_hash="ab"))
    assert (small["draft_vocab_size"], small["draft_vocab_hash"]) == (20, "ab")
    assert problems(small, PROFILES["vllm"]) == []
    assert "whole head" in problems(small, PROFILES["sglang"])[0]
    assert not [key for key in config() if key.startswith("draft_vocab")]


def test_a_static_profile_says_so_and_an_unknown_one_is_refused() -> None:
    assert "static" in PROFILES["sglang"].title
    assert "static" not in PROFILES["vllm"].title
    with pytest.raises(ExportError, match="vllm, sglang"):
        profile("llama.cpp")
