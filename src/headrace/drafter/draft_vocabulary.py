"""A reduced draft vocabulary: the ids that a drafter may draft, and the rows of the head that stand for them.

In: how often each id is trained, a size, and ids that must be there; or the mapping in a drafter's folder. Out: ids in
ascending order, the head's rows for them, and logits over the target's ids again. A mapping that is absent, of another
size or of another hash is refused: each row would silently mean another token. Layout: that of speculators and vLLM,
`d2t` int64 [D], a row's id less its place, and `t2d` bool [V], the ids that have a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.drafter.model import Drafter, Head, head_logits
from headrace.drafter.shape import DrafterShape
from headrace.errors import DrafterError
from headrace.prepare.prepared import PreparedSet
from headrace.record import digest
from headrace.target.head import FrozenHead

D2T, T2D, ROWS = "d2t", "t2d", "lm_head.weight"
_HINT = "the folder or checkpoint is of another drafter, or damaged; never make its mapping anew from other data"


@dataclass(frozen=True)
class Coverage:
    """What a draft vocabulary of `size` ids of `target_size` holds.

    `inside` and `inside_heldout` are shares of trained tokens, of training rows and of held-out ones (1 where there are
    none); `num_outside` trained tokens of the training rows carry no loss; `num_filler` ids are never trained: special
    ones, and lowest ids where fewer are seen than asked for.
    """

    size: int
    target_size: int
    inside: float
    inside_heldout: float
    num_outside: int
    num_filler: int

    def __str__(self) -> str:
        text = (
            f"{self.size:,} of {self.target_size:,} ids, which are {self.inside:.2%} of the trained tokens and "
            f"{self.inside_heldout:.2%} of the held-out ones; {self.num_outside:,} tokens outside carry no loss"
        )
        return text + (f"; {self.num_filler:,} ids are never trained" if self.num_filler else "")


def choose(counts_V: npt.NDArray[np.int64], size: int, always: Sequence[int]) -> torch.Tensor:
    """The most frequent ids; of equally frequent ones the lowest.

    Args:
        counts_V: how often each of the target's ids is trained.
        always: ids that are in whatever their count, above all those that end a turn.
    Returns: int64 [size], ascending.
    Raises: DrafterError for a size that is not smaller than the target's vocabulary, or has no room for `always`.
    """
    special = sorted(set(always))
    if not len(special) < size < len(counts_V):
        raise DrafterError(
            f"a draft vocabulary of more than {len(special)} ids (those that end a turn) and less than {len(counts_V)}",
            str(size),
            "set drafter.draft_vocabulary so, or leave it out for the whole vocabulary",
        )
    ranked = np.argsort(-counts_V, kind="stable")
    others = ranked[~np.isin(ranked, special)][: size - len(special)]
    return torch.from_numpy(np.sort(np.concatenate([np.array(special, dtype=np.int64), others])))


def covered(ids_D: torch.Tensor, counts_V: npt.NDArray[np.int64], heldout_V: npt.NDArray[np.int64]) -> Coverage:
    """Count what a vocabulary holds. Args: counts_V, heldout_V: trained tokens by id, of either side of the split."""
    ids = ids_D.numpy()

    def share(counts: npt.NDArray[np.int64]) -> float:
        return float(counts[ids].sum() / counts.sum()) if counts.sum() else 1.0

    outside = int(counts_V.sum() - counts_V[ids].sum())
    filler = int((counts_V[ids] == 0).sum())
    return Coverage(len(ids), len(counts_V), share(counts_V), share(heldout_V), outside, filler)


def vocabulary_hash(ids_D: torch.Tensor, target_size: int) -> str:
    """What names a mapping: 32 hex digits of its ids and the size of the target's vocabulary."""
    return digest(target_size.to_bytes(8, "little"), ids_D.numpy().astype("<i8").tobytes()).hex()


def mapping(ids_D: torch.Tensor, target_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d`, as engines load them."""
    held = torch.zeros(target_size, dtype=torch.bool)
    held[ids_D] = True
    return {D2T: ids_D - torch.arange(len(ids_D)), T2D: held}


def checked_ids(d2t_D: torch.Tensor, target_size: int, wanted: str | None) -> torch.Tensor:
    """The ids of a stored mapping.

    Args: wanted: the hash that was saved beside it; None where a foreign folder has none.
    Raises: DrafterError for ids that do not ascend within the target's vocabulary, and for another hash.
    """
    ids_D = d2t_D.cpu() + torch.arange(len(d2t_D))
    if int(ids_D[0]) < 0 or int(ids_D[-1]) >= target_size or bool((ids_D.diff() <= 0).any()):
        raise DrafterError(f"{D2T} of ascending ids below {target_size}", "others", _HINT)
    found = vocabulary_hash(ids_D, target_size)
    if wanted not in (None, found):
        raise DrafterError(f"a draft vocabulary with hash {wanted}", found, _HINT)
    return ids_D


@dataclass(frozen=True, eq=False, kw_only=True)
class ReducedHead(FrozenHead):
    """The frozen ends with a draft vocabulary's rows alone as `head_VH` [D, H]; the embedding is whole.

    `ids_D` the target's id of each row; `places_V` the row of each of the target's ids, -1 for those that have none.
    """

    ids_D: torch.Tensor
    places_V: torch.Tensor

    def labels(self, ids: torch.Tensor, supervised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in place of the target's ids (int64, any shape); what has no row is no longer supervised."""
        places = self.places_V[ids]
        return places.clamp(min=0), supervised & (places >= 0)


def draft_ids(drafter: Drafter) -> torch.Tensor | None:
    """The target's ids that a drafter may draft, int64 [D] on the CPU; None for all.

    Raises: DrafterError as `checked_ids`.
    """
    if drafter.d2t is None:
        return None
    return checked_ids(drafter.d2t, drafter.shape.vocab_size, drafter.shape.draft_vocab_hash)


def reduced(head: FrozenHead, ids_D: torch.Tensor | None) -> FrozenHead:
    """The head that a drafter of these ids has; the same one where they are all."""
    if ids_D is None:
        return head
    ids_D = ids_D.to(head.head_VH.device)
    places_V = ids_D.new_full((len(head.head_VH),), -1)
    places_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
    own: dict[str, Any] = {field.name: getattr(head, field.name) for field in fields(FrozenHead)}
    return ReducedHead(**{**own, "head_VH": head.head_VH[ids_D]}, ids_D=ids_D, places_V=places_V)


def target_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Logits [..., V] over the target's ids of hidden states [..., H]; minus infinity for ids without a row."""
    logits = head_logits(hidden, head)
    if not isinstance(head, ReducedHead):
        return logits
    whole = logits.new_full((*logits.shape[:-1], len(head.places_V)), -torch.inf)
    whole[..., head.ids_D] = logits
    return whole


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The ids of a run's drafters, int64 [D], and what they hold of its data."""

    ids_D: torch.Tensor
    coverage: Coverage

    def shape(self, shape: DrafterShape) -> DrafterShape:
        """A shape with this mapping's size and hash."""
        named = vocabulary_hash(self.ids_D, shape.vocab_size)
        return replace(shape, draft_vocab_size=len(self.ids_D), draft_vocab_hash=named)

    def give(self, drafter: Drafter) -> None:
        """Let a drafter of such a shape draft these ids."""
        assert drafter.d2t is not None
        drafter.d2t.copy_(mapping(self.ids_D, drafter.shape.vocab_size)[D2T])


def settle(
    size: int | None, start: Drafter | None, prepared: PreparedSet, target_size: int, always: Sequence[int]
) -> DraftVocabulary | None:
    """The draft vocabulary of a run: that of the drafter it goes on from, else counted from the prepared set.

    Args: size: drafter.draft_vocabulary. always: ids that end a turn.
    Returns: None for the whole vocabulary.
    Raises: DrafterError as `choose` and `checked_ids`.
    """
    ids_D = None if start is None else draft_ids(start)
    if ids_D is None and size is None:
        return None
    counts_V, heldout_V = (prepared.trained_counts(target_size, heldout=side) for side in (False, True))
    if ids_D is None:
        assert size is not None
        ids_D = choose(counts_V, size, always)
    return DraftVocabulary(ids_D, covered(ids_D, counts_V, heldout_V))
