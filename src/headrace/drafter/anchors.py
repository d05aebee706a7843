"""Which tokens blocks start from, and which slots of a block are supervised.

In: a sample's loss mask, and a seed that names sample and epoch. Out: sorted anchors drawn without replacement, and for
each block the ids its slots should predict. A block never learns from a token the target did not generate, nor from
beyond its sample: supervision stops at the first such slot.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.token_rule import eligible_anchors

Ints = npt.NDArray[np.int64]


def anchor_rng(seed: int, *visit: int) -> np.random.Generator:
    """A generator that depends on nothing but the seed and what names a visit (epoch and row, and more where a sample
    is drawn from again), so a resumed run draws the same anchors.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *visit])))


def draw_anchors(loss_mask: npt.NDArray[np.uint8], num: int, rng: np.random.Generator) -> Ints:
    """Draw up to `num` distinct anchors; int64, ascending, fewer where a sample has fewer."""
    eligible = eligible_anchors(loss_mask)
    if len(eligible) > num:
        eligible = np.sort(rng.permutation(eligible)[:num])
    return eligible


@dataclass(frozen=True, eq=False)
class Supervision:
    """What A blocks of B slots should predict.

    `target_ids` int64 [A, B], the token at anchor + slot (0 where there is none); `supervised` bool [A, B], False at
    slot 0, the anchor itself.
    """

    target_ids: Ints
    supervised: npt.NDArray[np.bool_]

    @property
    def num_supervised(self) -> int:
        """Supervised slots of all blocks."""
        return int(self.supervised.sum())


def supervise(
    input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8], anchors: Ints, block_size: int
) -> Supervision:
    """Line up the blocks at `anchors` with the tokens they should predict.

    Slot k predicts the token at anchor + k. A slot is supervised if every token from slot 1 to it is trained and
    inside the sample.
    """
    places = anchors[:, None] + np.arange(block_size)
    inside = places < len(input_ids)
    places = np.where(inside, places, 0)
    trained = inside & loss_mask.astype(bool)[places]
    supervised = np.logical_and.accumulate(trained[:, 1:], axis=1)
    first = np.zeros((len(anchors), 1), dtype=bool)
    return Supervision(np.where(inside, input_ids[places], 0).astype(np.int64), np.hstack([first, supervised]))
