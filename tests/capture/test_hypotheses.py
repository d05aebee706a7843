import pytest
import torch

from headrace.capture.hypotheses import judge, moved_rows, needed_taps, neighbours, relative_error
from headrace.taps import EMBEDDING, FINAL_POST_NORM, FINAL_PRE_NORM, Tap, parse_tap

BLOCKS = 5
COLUMNS = [parse_tap(name) for name in ("after_block:1", "after_block:2", "final:pre_norm")]


@pytest.fixture
def reference() -> dict[Tap, torch.Tensor]:
    """A residual stream that grows: each tap is the one before with something added."""
    made, states = {}, torch.randn(24, 16, generator=torch.manual_seed(0))
    for tap in [EMBEDDING, *(Tap("after_block", n) for n in range(BLOCKS))]:
        made[tap] = states = states + 0.4 * torch.randn(24, 16, generator=torch.manual_seed(tap.block + 5))
    made[FINAL_PRE_NORM] = states
    made[FINAL_POST_NORM] = 3 * states / states.norm(dim=1, keepdim=True)
    return made


def captured(reference: dict[Tap, torch.Tensor], *names: str) -> torch.Tensor:
    states = torch.stack([reference[parse_tap(name)] for name in names], 1)
    return states + 0.01 * torch.randn(states.shape, generator=torch.manual_seed(9))


def causes(reference: dict[Tap, torch.Tensor], *names: str) -> list[str]:
    return [v.cause for v in judge(captured(reference, *names), COLUMNS, reference, BLOCKS, "bfloat16")]


def test_the_stated_taps_hold_with_a_margin(reference: dict[Tap, torch.Tensor]) -> None:
    verdicts = judge(captured(reference, *map(str, COLUMNS)), COLUMNS, reference, BLOCKS, "bfloat16")
    assert [v.cause for v in verdicts] == ["", "", ""]
    assert all(v.ratio > 3 and 0 < v.error < 0.05 < v.neighbour_error for v in verdicts)


def test_each_fault_is_named(reference: dict[Tap, torch.Tensor]) -> None:
    assert causes(reference, "after_block:0", "after_block:1", "after_block:3") == [
        "after_block:1 holds after_block:0: one block early",
        "after_block:2 holds after_block:1: one block early",
        "final:pre_norm holds after_block:3: one block early",
    ]
    assert causes(reference, "after_block:2", "after_block:3", "final:pre_norm") == [
        "after_block:1 holds after_block:2: one block late",
        "after_block:2 holds after_block:3: one block late",
        "",
    ]
    assert causes(reference, "after_block:2", "after_block:1", "final:pre_norm") == [
        "after_block:1 holds after_block:2: columns are not in the stated order",
        "after_block:2 holds after_block:1: columns are not in the stated order",
        "",
    ]
    assert causes(reference, "after_block:1", "after_block:2", "final:post_norm") == [
        "",
        "",
        "final:pre_norm holds final:post_norm: the final norm was applied",
    ]


def test_what_is_no_neighbour_is_other_weights(reference: dict[Tap, torch.Tensor]) -> None:
    noise = torch.randn(24, 3, 16, generator=torch.manual_seed(1))
    verdicts = judge(noise, COLUMNS, reference, BLOCKS, "bfloat16")
    assert all("none of its neighbours" in v.cause and "weights" in v.fix for v in verdicts)


def test_taps_that_cannot_be_told_apart_do_not_pass(reference: dict[Tap, torch.Tensor]) -> None:
    same = {**reference, Tap("after_block", 0): reference[Tap("after_block", 1)]}
    first = judge(captured(reference, *map(str, COLUMNS)), COLUMNS, same, BLOCKS, "bfloat16")[0]
    assert first.cause.startswith("after_block:1 cannot be told from after_block:0")


def test_rows_out_of_place_are_found(reference: dict[Tap, torch.Tensor]) -> None:
    rows = reference[Tap("after_block", 1)]
    assert moved_rows(rows, rows, 0.05) == ""
    swapped = torch.cat([rows[8:16], rows[:8], rows[16:]])
    assert moved_rows(swapped, rows, 0.05) == (
        "rows out of place: token 0 holds the states of token 8 (16 of 24 in all)"
    )
    lost = rows.clone()
    lost[5] = 0
    assert moved_rows(lost, rows, 0.05) == "rows out of place: token 5 holds no token's states (1 of 24 in all)"
    assert moved_rows(torch.randn(24, 16), rows, 0.05) == "", "rows are not what is wrong"


def test_token_0_counts_for_nothing() -> None:
    expected = torch.randn(4, 8, generator=torch.manual_seed(0))
    found = expected.clone()
    found[0] = 1e6
    assert relative_error(found, expected) == 0
    assert relative_error(2 * expected, expected) == pytest.approx(1)


def test_neighbours_are_blocks_and_sides_of_the_norm() -> None:
    assert neighbours(Tap("after_block", 0), 5) == {Tap("after_block", 1): "late", EMBEDDING: "early"}
    assert neighbours(Tap("after_block", 4), 5) == {FINAL_POST_NORM: "normed", Tap("after_block", 3): "early"}
    assert neighbours(FINAL_POST_NORM, 5) == {FINAL_PRE_NORM: "not normed"}
    assert neighbours(EMBEDDING, 5) == {Tap("after_block", 0): "late"}
    assert neighbours(FINAL_PRE_NORM, 1) == {EMBEDDING: "early", FINAL_POST_NORM: "normed"}
    assert len(needed_taps(COLUMNS, 5)) == len({*COLUMNS, *map(parse_tap, ("after_block:0", "after_block:3"))}) + 1
