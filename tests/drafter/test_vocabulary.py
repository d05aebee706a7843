"""A sampled head keeps what is predicted and weighs the rest so that sums are right on average."""

import numpy as np
import torch

from headrace.drafter.loss import Weighting, block_loss
from headrace.drafter.vocabulary import sample_head
from tests.drafter.tiny import HIDDEN, VOCAB, tiny_head

N, B = 6, 4


def blocks(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, B, HIDDEN, generator=random, requires_grad=True)
    supervised = torch.rand(N, B, generator=random) > 0.3
    supervised[:, 0] = False
    return hidden, torch.randint(0, VOCAB, (N, B), generator=random), supervised


def test_what_is_predicted_is_kept_and_weighs_one() -> None:
    _, ids, _ = blocks()
    rows = sample_head(tiny_head(), ids, 30, np.random.default_rng(0))
    assert len(rows.head_VH) == max(30, 2 * len(ids.unique()))
    assert torch.equal(rows.head_VH[rows.places[ids]], tiny_head().head_VH[ids])
    assert bool((rows.log_weight_V[rows.places[ids]] == 0).all())
    total = float(rows.log_weight_V.exp().sum())
    assert abs(total - VOCAB) < 1e-3


def test_the_whole_vocabulary_gives_the_exact_loss_and_gradient() -> None:
    for scales in ({}, {"logit_scale": 0.5, "softcap": 3.0}):
        head = tiny_head(**scales)
        found = []
        for use in (head, sample_head(head, torch.tensor([3]), VOCAB, np.random.default_rng(0))):
            hidden, ids, supervised = blocks()
            loss = block_loss(hidden, ids, supervised, use, Weighting("dpace"), 7.0)
            loss.loss.backward()
            found.append((loss.loss.detach(), loss.ce_NB, hidden.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_loss_and_gradient_of_a_sample_equal_the_plain_ones() -> None:
    head = tiny_head(softcap=5.0)
    hidden, ids, supervised = blocks(1)
    rows = sample_head(head, ids[supervised], 40, np.random.default_rng(1))
    block_loss(hidden, ids, supervised, rows, Weighting("decay", gamma=2.0), 3.0).loss.backward()
    plain = hidden.detach().clone().requires_grad_()
    logits = torch.tanh(plain @ rows.head_VH.T / 5.0) * 5.0 + rows.log_weight_V
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.places[ids].flatten(), reduction="none").view(
        N, B
    )
    weights = torch.exp(-(torch.arange(B) - 1) / 2.0) * supervised
    ((ce * weights).sum() / 3.0).backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_sums_are_right_on_average() -> None:
    head, ids = tiny_head(), torch.tensor([5, 9])
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.1
    exact = float((head.head_VH @ hidden).exp().sum())
    rng = np.random.default_rng(3)
    drawn = []
    for _ in range(400):
        rows = sample_head(head, ids, 12, rng)
        drawn.append(float((rows.head_VH @ hidden + rows.log_weight_V).exp().sum()))
    assert abs(np.mean(drawn) / exact - 1) < 0.03
    assert np.std(drawn) > 0


def test_a_step_draws_the_same_rows_again() -> None:
    a, b = (sample_head(tiny_head(), torch.tensor([1]), 20, np.random.default_rng(7)) for _ in range(2))
    assert torch.equal(a.head_VH, b.head_VH)
