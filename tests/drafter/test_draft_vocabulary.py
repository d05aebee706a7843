"""A reduced draft vocabulary: chosen by count, lined up as engines read it, mapped back, refused when it is another."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headrace.drafter.draft_vocabulary import (
    DraftVocabulary,
    ReducedHead,
    checked_ids,
    choose,
    covered,
    draft_ids,
    mapping,
    reduced,
    settle,
    target_logits,
    vocabulary_hash,
)
from headrace.drafter.loss import Teacher, Weighting, block_loss
from headrace.drafter.model import Drafter, head_logits
from headrace.drafter.vocabulary import sample_head
from headrace.errors import DrafterError
from headrace.evaluate.sampling import Sampling
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.record import sample_id
from headrace.target.head import FrozenHead
from tests.drafter.tiny import BLOCK, HIDDEN, VOCAB, tiny_head, tiny_shape

IDS = torch.tensor([1, 4, 5, 9, 20, 21, 40, 63])


def head(**scales: float) -> FrozenHead:
    tiny = tiny_head(**scales)
    return FrozenHead(
        tiny.embedding_VH, tiny.head_VH, torch.ones(HIDDEN), 1.0, tiny.logit_scale, tiny.softcap, norm_eps=1e-6
    )


def small(**scales: float) -> ReducedHead:
    found = reduced(head(**scales), IDS)
    assert isinstance(found, ReducedHead)
    return found


def blocks(num: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids of which about half are in the vocabulary, and which slots are supervised."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, BLOCK, HIDDEN, generator=random, requires_grad=True)
    inside = IDS[torch.randint(0, len(IDS), (num, BLOCK), generator=random)]
    ids = torch.where(
        torch.rand(num, BLOCK, generator=random) > 0.5, inside, torch.randint(0, VOCAB, (num, BLOCK), generator=random)
    )
    supervised = torch.rand(num, BLOCK, generator=random) > 0.2
    supervised[:, 0] = False
    return hidden, ids, supervised


def prepared(folder: Path, rows: list[list[int]], heldout: int = 0) -> PreparedSet:
    """A set of rows whose first id is the prompt; the last `heldout` are held out."""
    drafts = []
    for number, ids in enumerate(rows):
        own, mask = np.array(ids, np.int32), np.array([0] + [1] * (len(ids) - 1), np.uint8)
        drafts.append(Draft(sample_id(own, mask), own, mask, "made", number >= len(rows) - heldout))
    write_prepared(folder, drafts, {"fingerprint": "f"})
    return PreparedSet.open(folder)


def test_the_most_frequent_ids_and_those_that_end_a_turn_are_chosen() -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[[7, 3, 30, 8]] = [9, 2, 2, 1]
    assert choose(counts, 3, []).tolist() == [3, 7, 30]
    assert choose(counts, 4, [2]).tolist() == [2, 3, 7, 30]
    assert choose(counts, 2, [2]).tolist() == [2, 7]
    assert choose(counts, 6, [2]).tolist() == [0, 2, 3, 7, 8, 30]  # filled with the lowest


@pytest.mark.parametrize("size", [0, 2, VOCAB, VOCAB + 1])
def test_a_size_without_room_or_of_everything_is_refused(size: int) -> None:
    with pytest.raises(DrafterError, match="more than 2 ids"):
        choose(np.ones(VOCAB, np.int64), size, [2, 5])


def test_what_is_outside_and_what_is_filler_is_counted() -> None:
    counts, heldout = np.zeros(VOCAB, np.int64), np.zeros(VOCAB, np.int64)
    counts[[7, 3, 30]] = [6, 3, 1]
    heldout[[7, 31]] = [1, 3]
    found = covered(torch.tensor([2, 3, 7]), counts, heldout)
    assert (found.inside, found.inside_heldout, found.num_outside, found.num_filler) == (0.9, 0.25, 1, 1)
    assert "90.00%" in str(found)
    assert "1 ids are never trained" in str(found)


def test_the_mapping_is_what_engines_read() -> None:
    """vLLM adds d2t to a row's place; speculators takes the rows of the head where t2d holds."""
    stored = mapping(IDS, VOCAB)
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].dtype == torch.bool
    assert (torch.arange(len(IDS)) + stored["d2t"]).tolist() == IDS.tolist()
    assert torch.equal(head().head_VH[stored["t2d"]], small().head_VH)
    assert small().embedding_VH.shape == (VOCAB, HIDDEN)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.5, "softcap": 4.0}])
def test_the_loss_is_the_full_one_restricted_to_the_rows(kind: str, scales: dict[str, float]) -> None:
    hidden, ids, supervised = blocks()
    own = small(**scales)
    rows, kept = own.labels(ids, supervised)
    assert 0 < int((supervised & ~kept).sum()) < int(kept.sum())
    found = block_loss(hidden, rows, kept, own, Weighting(kind, gamma=2.0), 7.0)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(found.loss, hidden)
    logits = head_logits(hidden, head(**scales)).index_select(-1, IDS)
    labels = torch.tensor([IDS.tolist().index(i) if i in IDS else 0 for i in ids.flatten().tolist()])
    ce = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none").view(ids.shape)
    inside = torch.isin(ids, IDS) & supervised
    weights = Weighting(kind, gamma=2.0).weights(torch.where(inside, ce, 0.0).detach(), inside)  # type: ignore[arg-type]
    expected = (ce * weights * inside).sum() / 7.0
    (expected_grad,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)
    assert not grad[~inside].any()


def test_a_sampled_vocabulary_draws_from_the_draft_vocabularys_rows() -> None:
    hidden, ids, supervised = blocks()
    own = small()
    rows, kept = own.labels(ids, supervised)
    sampled = sample_head(own, rows[kept], len(IDS), np.random.default_rng(0))
    assert len(sampled.head_VH) == len(IDS)
    whole = block_loss(hidden, rows, kept, own, Weighting(), 3.0)
    found = block_loss(hidden, rows, kept, sampled, Weighting(), 3.0)
    torch.testing.assert_close(found.loss, whole.loss)


def test_the_targets_own_distribution_is_restricted_to_the_rows_too() -> None:
    hidden, ids, supervised = blocks()
    own = small()
    rows, kept = own.labels(ids, supervised)
    said = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
    found = block_loss(hidden, rows, kept, own, Weighting("decay", gamma=1e9), 1.0, Teacher("kl", said))
    log_q, log_p = (head_logits(x, head()).index_select(-1, IDS).log_softmax(-1) for x in (hidden, said))
    expected = ((log_p.exp() * (log_p - log_q)).sum(-1) * kept).sum()
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-4)


def test_drafts_are_the_targets_ids_and_never_outside() -> None:
    hidden, *_ = blocks()
    logits, whole = target_logits(hidden, small()), head_logits(hidden, head())
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits[..., IDS], whole[..., IDS])
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[IDS] = False
    assert bool((logits[..., outside] == -torch.inf).all())
    assert torch.equal(logits.argmax(-1), IDS[whole[..., IDS].argmax(-1)])
    chances = Sampling(1.0, 0.9).probabilities(logits[0])
    assert not chances[:, outside].any()
    torch.testing.assert_close(chances.sum(-1), torch.ones(BLOCK))
    assert torch.equal(target_logits(hidden, head()), whole)


def test_a_mapping_of_another_hash_or_order_is_refused() -> None:
    stored = mapping(IDS, VOCAB)["d2t"]
    own = vocabulary_hash(IDS, VOCAB)
    assert torch.equal(checked_ids(stored, VOCAB, own), IDS)
    assert torch.equal(checked_ids(stored, VOCAB, None), IDS)
    other = stored.clone()
    other[-1] -= 1
    with pytest.raises(DrafterError, match=own):
        checked_ids(other, VOCAB, own)
    for wrong in (stored.flip(0), stored - 2, stored + 1, torch.zeros_like(stored) - 1):
        with pytest.raises(DrafterError, match="ascending"):
            checked_ids(wrong, VOCAB, None)
    assert vocabulary_hash(IDS, VOCAB + 1) != own


def test_a_drafter_without_its_mapping_is_not_taken_for_one_of_the_first_ids() -> None:
    """Zeros, as an unfilled buffer has them, would be the ids 0 to D - 1 (case B74)."""
    named = DraftVocabulary(IDS, covered(IDS, np.ones(VOCAB, np.int64), np.zeros(VOCAB, np.int64))).shape(tiny_shape())
    with pytest.raises(DrafterError, match="hash"):
        draft_ids(Drafter(named))


def test_ids_are_counted_over_the_trained_tokens_of_training_rows(tmp_path: Path) -> None:
    found = prepared(tmp_path, [[9, 5, 5, 6], [9, 5, 7], [9, 8, 8, 8, 8]], heldout=1)
    settled = settle(2, None, found, VOCAB, [])
    assert settled is not None
    assert settled.ids_D.tolist() == [5, 6]
    assert settled.coverage.num_outside == 1
    assert settled.coverage.inside_heldout == 0.0
    assert settle(None, None, found, VOCAB, []) is None


def test_a_drafter_that_is_gone_on_from_keeps_its_mapping_whatever_the_new_data_say(tmp_path: Path) -> None:
    vocabulary = DraftVocabulary(IDS, covered(IDS, np.ones(VOCAB, np.int64), np.zeros(VOCAB, np.int64)))
    start = Drafter(vocabulary.shape(tiny_shape()))
    vocabulary.give(start)
    data = prepared(tmp_path, [[9, 50, 51, 52]])
    for size in (None, len(IDS)):
        settled = settle(size, start, data, VOCAB, [])
        assert settled is not None
        assert torch.equal(settled.ids_D, IDS)
        assert settled.coverage.inside == 0.0


def test_a_shape_tells_size_and_hash_and_older_ones_stay_as_they_were() -> None:
    assert not [key for key in tiny_shape().to_json() if key.startswith("draft_vocab")]
    named = replace(tiny_shape(), draft_vocab_size=8, draft_vocab_hash="ab")
    assert type(named).from_json(named.to_json()) == named
    with pytest.raises(DrafterError, match="smaller"):
        replace(tiny_shape(), draft_vocab_size=VOCAB)
