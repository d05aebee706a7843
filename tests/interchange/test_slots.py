"""What a person says of slots: names, numbers with a convention, the last state; nothing guessed."""

import pytest

from headrace.errors import ConfigError
from headrace.interchange.slots import CONVENTIONS, said_final, said_taps
from headrace.taps import FINAL_POST_NORM, FINAL_PRE_NORM


def names(said: str | None, num_slots: int, listed: tuple[int, ...] | None = None) -> list[str]:
    return [str(tap) for tap in said_taps(said, num_slots, 64, listed)]


QWEN = ["after_block:1", "after_block:16", "after_block:31", "after_block:46", "after_block:61"]


@pytest.mark.parametrize(
    "said",
    [
        ",".join(QWEN),
        "vllm:2,17,32,47,62",
        "speculators:2,17,32,47,62",
        "transformers:2,17,32,47,62",
        "zlab:1,16,31,46,61",
        "sglang:1,16,31,46,61",
    ],
)
def test_the_same_tensors_have_one_name_whoever_numbers_them(said: str) -> None:
    assert names(said, 5) == QWEN


def test_the_convention_alone_reads_numbers_that_the_files_list() -> None:
    assert names("zlab", 2, (1, 16)) == ["after_block:1", "after_block:16"]
    assert names("vllm", 2, (1, 16)) == ["after_block:0", "after_block:15"]


def test_vllm_s_last_number_is_the_state_before_the_norm() -> None:
    assert names("vllm:0,64", 2) == ["embedding", "final:pre_norm"]


@pytest.mark.parametrize(
    ("said", "num_slots", "listed", "word"),
    [
        (None, 2, None, "do not say"),
        ("", 2, (1, 16), r"\[1, 16\]"),
        ("zlab", 2, None, "list none"),
        ("vllm:1,x", 2, None, "whole numbers"),
        ("vllm:1,65", 2, None, "vLLM"),
        ("after_block:1", 2, None, "2 taps"),
        ("16,31", 2, None, "name of a tap"),
        ("after_block:1,after_block:1", 2, None, "once"),
        ("after_block:1,after_block:64", 2, None, "0 to 63"),
        ("after_block:0,after_block:15", 2, (1, 16), "z-lab"),
        ("vllm:2,17", 2, (1, 16), "list"),
    ],
)
def test_anything_else_is_refused(said: str | None, num_slots: int, listed: tuple[int, ...] | None, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        said_taps(said, num_slots, 64, listed)


def test_a_refusal_names_the_conventions() -> None:
    with pytest.raises(ConfigError) as caught:
        said_taps(None, 1, 64, None)
    assert all(convention in str(caught.value) for convention in CONVENTIONS)


def test_the_norm_state_of_a_last_state_is_said() -> None:
    assert said_final("pre_norm", True) == FINAL_PRE_NORM
    assert said_final("post_norm", True) == FINAL_POST_NORM
    assert said_final("drop", True) is None
    assert said_final(None, False) is None
    assert said_final("drop", False) is None
    for said, has_final in [(None, True), ("pre_norm", False), ("post_norm", False), ("normed", True)]:
        with pytest.raises(ConfigError, match="--final"):
            said_final(said, has_final)
