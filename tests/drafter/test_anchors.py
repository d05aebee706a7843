"""Where blocks start and how far they are supervised."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.drafter.anchors import anchor_rng, draw_anchors, supervise
from headrace.token_rule import eligible_anchors

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=60).map(lambda bits: np.array(bits, dtype=np.uint8))


@given(mask=MASKS, num=st.integers(1, 20), seed=st.integers(0, 99), epoch=st.integers(0, 9), row=st.integers(0, 99))
def test_anchors_are_distinct_generated_tokens_with_a_generated_next_one(
    mask: np.ndarray, num: int, seed: int, epoch: int, row: int
) -> None:
    drawn = draw_anchors(mask, num, anchor_rng(seed, epoch, row))
    assert len(drawn) == min(num, len(eligible_anchors(mask)))
    assert (np.diff(drawn) > 0).all()
    assert all(mask[a] and mask[a + 1] for a in drawn)
    np.testing.assert_array_equal(drawn, draw_anchors(mask, num, anchor_rng(seed, epoch, row)))


def test_another_epoch_draws_other_anchors() -> None:
    mask = np.ones(200, dtype=np.uint8)
    drawn = [draw_anchors(mask, 20, anchor_rng(0, epoch, 5)).tolist() for epoch in range(3)]
    assert drawn[0] != drawn[1] != drawn[2]


@given(mask=MASKS, block=st.integers(2, 9))
def test_supervision_stops_at_the_first_untrained_token_and_at_the_end(mask: np.ndarray, block: int) -> None:
    ids = np.arange(len(mask), dtype=np.int32) + 100
    anchors = eligible_anchors(mask)
    lined_up = supervise(ids, mask, anchors, block)
    assert not lined_up.supervised[:, :1].any()
    for n, anchor in enumerate(anchors):
        for slot in range(1, block):
            reached = anchor + slot < len(mask) and bool(mask[anchor + 1 : anchor + slot + 1].all())
            assert lined_up.supervised[n, slot] == reached
            if reached:
                assert lined_up.target_ids[n, slot] == ids[anchor + slot]


def test_a_two_turn_chat_supervises_nothing_across_the_users_turn() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=np.uint8)
    lined_up = supervise(np.arange(8, dtype=np.int32), mask, eligible_anchors(mask), 4)
    assert eligible_anchors(mask).tolist() == [2, 5, 6]
    assert lined_up.supervised.tolist() == [
        [False, True, False, False],
        [False, True, True, False],
        [False, True, False, False],
    ]
