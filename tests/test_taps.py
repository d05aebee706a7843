import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.taps import (
    EMBEDDING,
    FINAL_POST_NORM,
    FINAL_PRE_NORM,
    Tap,
    check_engine_order,
    default_taps,
    from_sglang,
    from_speculators,
    from_transformers,
    from_vllm,
    from_zlab,
    parse_tap,
    parse_taps,
    to_sglang,
    to_speculators,
    to_transformers,
    to_vllm,
    to_zlab,
)


def after(block: int) -> Tap:
    return Tap("after_block", block)


# Qwen3.6-27B: 64 blocks, z-lab's five taps; each program's own numbers for the same five tensors.
BLOCKS_27B = 64
TAPS_27B = tuple(after(i) for i in (1, 16, 31, 46, 61))
NUMBERS_27B = [
    (to_transformers, from_transformers, [2, 17, 32, 47, 62]),
    (to_vllm, from_vllm, [2, 17, 32, 47, 62]),
    (to_speculators, from_speculators, [2, 17, 32, 47, 62]),
    (to_zlab, from_zlab, [1, 16, 31, 46, 61]),
    (to_sglang, from_sglang, [1, 16, 31, 46, 61]),
]


@pytest.mark.parametrize(("to", "back", "numbers"), NUMBERS_27B)
def test_the_five_taps_of_the_27b_target_have_the_numbers_seen_in_the_field(to, back, numbers: list[int]) -> None:
    assert [to(tap, BLOCKS_27B) for tap in TAPS_27B] == numbers
    assert tuple(back(number, BLOCKS_27B) for number in numbers) == TAPS_27B


def test_the_default_rule_is_z_labs() -> None:
    assert default_taps(BLOCKS_27B) == TAPS_27B
    assert default_taps(36) == tuple(after(i) for i in (1, 9, 17, 25, 33))  # Qwen3-8B
    assert default_taps(64, 1) == (after(32),)


def test_vllms_last_number_is_the_final_state_before_the_norm() -> None:
    assert to_vllm(FINAL_PRE_NORM, 64) == 64
    assert from_vllm(64, 64) == FINAL_PRE_NORM
    # The last block's output is that same tensor, under either name.
    assert to_vllm(after(63), 64) == 64


def test_transformers_last_entry_is_after_the_norm() -> None:
    assert to_transformers(FINAL_POST_NORM, 64) == 64
    assert from_transformers(64, 64) == FINAL_POST_NORM
    for tap in (FINAL_PRE_NORM, after(63)):
        with pytest.raises(ConfigError, match="output_hidden_states"):
            to_transformers(tap, 64)


def test_the_embedding_has_a_number_everywhere() -> None:
    assert [to(EMBEDDING, 64) for to, _, _ in NUMBERS_27B] == [0, 0, 0, -1, -1]
    assert [back(n, 64) for (_, back, _), n in zip(NUMBERS_27B, [0, 0, 0, -1, -1], strict=True)] == [EMBEDDING] * 5


@pytest.mark.parametrize("to", [to_vllm, to_speculators, to_zlab, to_sglang])
def test_no_engine_hands_out_the_normed_final_state(to) -> None:
    with pytest.raises(ConfigError, match="final:pre_norm"):
        to(FINAL_POST_NORM, 64)


@given(num_blocks=st.integers(1, 128), data=st.data())
def test_numbers_and_taps_convert_both_ways(num_blocks: int, data: st.DataObject) -> None:
    for to, back, low, high in [
        (to_transformers, from_transformers, 0, num_blocks),
        (to_vllm, from_vllm, 0, num_blocks),
        (to_zlab, from_zlab, -1, num_blocks - 1),
    ]:
        number = data.draw(st.integers(low, high))
        assert to(back(number, num_blocks), num_blocks) == number
        for outside in (low - 1, high + 1):
            with pytest.raises(ConfigError, match="from"):
                back(outside, num_blocks)


@given(block=st.integers(0, 500))
def test_a_name_is_read_back(block: int) -> None:
    for tap in (after(block), EMBEDDING, FINAL_PRE_NORM, FINAL_POST_NORM):
        assert parse_tap(str(tap)) == tap


NO_TAPS = ["16", "", "after_block", "after_block:", "after_block:-1", "after_block:1.0", "after_block: 1", "final"]


@pytest.mark.parametrize("name", [*NO_TAPS, "final:norm", "embedding:0", "after_block:²", "layer:3"])
def test_anything_else_is_no_tap(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of a tap"):
        parse_tap(name)


def test_a_list_of_taps_keeps_its_order() -> None:
    assert parse_taps(["after_block:3", "embedding"], 4) == (after(3), EMBEDDING)


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "at least one"), (["embedding", "embedding"], "each tap once"), (["after_block:4"], "from 0 to 3")],
)
def test_a_list_that_the_target_cannot_give_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_taps(names, 4)


@given(num_blocks=st.integers(1, 128), num_taps=st.integers(1, 12))
def test_the_default_rule_gives_distinct_taps_in_depth_order_or_refuses(num_blocks: int, num_taps: int) -> None:
    # n taps between block 1 and block N-3 are distinct only if there is room for them (one tap: any depth).
    if num_taps > max(1, num_blocks - 3):
        with pytest.raises(ConfigError, match="deep enough"):
            default_taps(num_blocks, num_taps)
        return
    taps = default_taps(num_blocks, num_taps)
    assert len(set(taps)) == num_taps
    assert parse_taps(map(str, taps), num_blocks) == taps
    check_engine_order(taps, num_blocks)


@pytest.mark.parametrize("num_taps", [0, -1])
def test_no_taps_at_all_is_refused(num_taps: int) -> None:
    with pytest.raises(ConfigError):
        default_taps(30, num_taps)


def test_engines_need_ascending_taps() -> None:
    check_engine_order([EMBEDDING, after(0), after(5), FINAL_PRE_NORM], 8)
    for wrong in ([after(5), after(1)], [after(7), FINAL_PRE_NORM], [after(1), EMBEDDING]):
        with pytest.raises(ConfigError, match="ascending"):
            check_engine_order(wrong, 8)
