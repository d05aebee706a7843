"""The chunked loss is the plain one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.drafter import loss as loss_module
from headrace.drafter.loss import Teacher, Weighting, block_loss
from headrace.drafter.model import head_logits
from tests.drafter.tiny import BLOCK, HIDDEN, VOCAB, TinyHead, tiny_head


def inputs(num_blocks: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_blocks, BLOCK, HIDDEN, generator=random, requires_grad=True)
    ids = torch.randint(0, VOCAB, (num_blocks, BLOCK), generator=random)
    lengths = torch.randint(0, BLOCK, (num_blocks, 1), generator=random)
    slots = torch.arange(BLOCK)
    return hidden, ids, (slots >= 1) & (slots <= lengths)


def plain(
    hidden: torch.Tensor, ids: torch.Tensor, supervised: torch.Tensor, head: TinyHead, weighting: Weighting
) -> torch.Tensor:
    """The loss with every logit at once, written from the papers' formulas, slot by slot."""
    ce = F.cross_entropy(head_logits(hidden, head).transpose(1, 2), ids, reduction="none")
    total = torch.zeros(())
    for n in range(len(ids)):
        slots = torch.nonzero(supervised[n])[:, 0].tolist()
        q = [(1 - weighting.alpha) * torch.exp(-ce[n, k]).detach() + weighting.alpha for k in slots]
        for i, k in enumerate(slots):
            if weighting.kind == "decay":
                weight = torch.exp(torch.tensor(-(k - 1) / weighting.gamma))
            else:
                weight = sum((torch.stack(q[: m + 1]).prod() for m in range(i, len(slots))), torch.zeros(()))
            total = total + weight * ce[n, k]
    return total


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.3}, {"softcap": 4.0}, {"logit_scale": 2.0, "softcap": 5.0}])
def test_loss_and_gradient_equal_the_plain_ones(kind: str, scales: dict[str, float]) -> None:
    head, weighting = tiny_head(**scales), Weighting(kind, gamma=2.0, alpha=0.4)  # type: ignore[arg-type]
    hidden, ids, supervised = inputs()
    expected = plain(hidden, ids, supervised, head, weighting) / 7.0
    (expected_grad,) = torch.autograd.grad(expected, hidden)
    found = block_loss(hidden, ids, supervised, head, weighting, 7.0)
    (found_grad,) = torch.autograd.grad(found.loss, hidden)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-4, atol=1e-6)


def plain_distance(
    hidden: torch.Tensor, supervised: torch.Tensor, head: TinyHead, teacher: Teacher, weights: torch.Tensor
) -> torch.Tensor:
    """The distance to the target's distribution with every logit at once."""
    log_q = F.log_softmax(head_logits(hidden, head), -1)
    log_p = F.log_softmax(head_logits(teacher.hidden_NBH, head), -1)
    if teacher.kind == "kl":
        distance = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    else:
        distance = 1 - torch.minimum(log_q.exp(), log_p.exp()).sum(-1)
    return (distance * weights * supervised).sum()


@pytest.mark.parametrize("kind", ["kl", "tv"])
@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.3}, {"logit_scale": 2.0, "softcap": 5.0}])
def test_distance_and_gradient_to_the_targets_distribution_equal_the_plain_ones(
    kind: str, scales: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_POSITIONS", 7)
    monkeypatch.setattr(loss_module, "_SLICE_ELEMENTS", 3 * VOCAB)
    head, weighting = tiny_head(**scales), Weighting("dpace", alpha=0.4)
    hidden, ids, supervised = inputs()
    said = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))
    teacher = Teacher(kind, said)  # type: ignore[arg-type]
    found = block_loss(hidden, ids, supervised, head, weighting, 7.0, teacher)
    tokens = block_loss(hidden, ids, supervised, head, weighting, 7.0)
    weights = weighting.weights(tokens.ce_NB, supervised)
    expected = plain_distance(hidden, supervised, head, teacher, weights) / 7.0
    (expected_grad,) = torch.autograd.grad(expected, hidden)
    (found_grad,) = torch.autograd.grad(found.loss, hidden)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.ce_NB, tokens.ce_NB, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.hit_NB, tokens.hit_NB)


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_a_drafter_that_says_what_the_target_says_is_at_rest(kind: str) -> None:
    hidden, ids, supervised = inputs()
    teacher = Teacher(kind, hidden.detach().clone())  # type: ignore[arg-type]
    found = block_loss(hidden, ids, supervised, tiny_head(), Weighting(), 1.0, teacher)
    (grad,) = torch.autograd.grad(found.loss, hidden)
    assert abs(float(found.loss.detach())) < 1e-5
    assert float(grad.abs().max()) < 1e-5


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, weighting = tiny_head(), Weighting()
    hidden, ids, supervised = inputs(40)
    whole = block_loss(hidden, ids, supervised, head, weighting, 3.0)
    (whole_grad,) = torch.autograd.grad(whole.loss, hidden)
    monkeypatch.setattr(loss_module, "CHUNK_POSITIONS", 5)
    monkeypatch.setattr(loss_module, "_SLICE_ELEMENTS", 2 * VOCAB)
    cut = block_loss(hidden, ids, supervised, head, weighting, 3.0)
    (cut_grad,) = torch.autograd.grad(cut.loss, hidden)
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cut_grad, whole_grad, rtol=1e-4, atol=1e-7)


def test_slots_without_supervision_get_no_gradient_and_no_loss() -> None:
    hidden, ids, supervised = inputs()
    found = block_loss(hidden, ids, supervised, tiny_head(), Weighting(), 1.0)
    (grad,) = torch.autograd.grad(found.loss, hidden)
    assert not grad[~supervised].any()
    assert grad[supervised].abs().sum(-1).min() > 0
    assert not found.ce_NB[~supervised].any()


def test_nothing_supervised_is_a_loss_of_zero() -> None:
    hidden, ids, supervised = inputs()
    found = block_loss(hidden, ids, torch.zeros_like(supervised), tiny_head(), Weighting(), 1.0)
    found.loss.backward()
    assert found.loss.item() == 0
    assert not hidden.grad.any()  # type: ignore[union-attr]


def test_hits_are_where_the_highest_logit_is_the_targets_token() -> None:
    hidden, _, supervised = inputs()
    head = tiny_head()
    best = head_logits(hidden, head).argmax(-1)
    assert torch.equal(block_loss(hidden, best, supervised, head, Weighting(), 1.0).hit_NB, supervised)


def test_decay_weighs_slot_k_by_exp_of_minus_k_minus_1_over_gamma() -> None:
    weights = Weighting("decay", gamma=4.0).weights(torch.zeros(1, 4), torch.tensor([[False, True, True, True]]))
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0, 0.7788, 0.6065]]), atol=1e-4, rtol=0)


def test_a_slot_without_supervision_neither_counts_nor_lowers_what_counts() -> None:
    ce = torch.tensor([[9.0, 0.0, 1.0, 7.0]])
    weights = Weighting("dpace", alpha=0.5).weights(ce, torch.tensor([[False, True, True, False]]))
    second = 0.5 * torch.exp(torch.tensor(-1.0)).item() + 0.5
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0 + second, second, 0.0]]))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_holds_the_logits_of_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_POSITIONS", 8)
    hidden, ids, supervised = inputs(200)
    rows = torch.randn(1024, HIDDEN, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        block_loss(hidden, ids, supervised, TinyHead(rows, rows), Weighting(), 1.0).loss.backward()
    assert largest.elements <= max(8 * len(rows), rows.numel(), hidden.numel())
    assert supervised.sum() * len(rows) > 4 * largest.elements


def test_a_bfloat16_head_stays_close_to_the_exact_loss_inside_autocast() -> None:
    head, weighting = tiny_head(), Weighting()
    hidden, ids, supervised = inputs(30)
    exact = block_loss(hidden, ids, supervised, head, weighting, 1.0)
    (exact_grad,) = torch.autograd.grad(exact.loss, hidden)
    rounded = dataclasses.replace(head, head_VH=head.head_VH.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = block_loss(hidden, ids, supervised, rounded, weighting, 1.0)
    (grad,) = torch.autograd.grad(found.loss, hidden)
    assert found.ce_NB.dtype == torch.float32
    torch.testing.assert_close(found.loss, exact.loss, rtol=1e-2, atol=0)
    assert F.cosine_similarity(grad.flatten(), exact_grad.flatten(), dim=0) > 0.999


def test_a_float32_head_stays_exact_inside_autocast() -> None:
    hidden, ids, supervised = inputs(30)
    exact = block_loss(hidden, ids, supervised, tiny_head(), Weighting(), 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = block_loss(hidden, ids, supervised, tiny_head(), Weighting(), 1.0)
    grads = [torch.autograd.grad(each.loss, hidden)[0] for each in (exact, found)]
    assert torch.equal(found.loss, exact.loss)
    assert torch.equal(*grads)


def test_a_hopeless_slot_has_its_true_cross_entropy() -> None:
    """Its own share of the softmax is 0 in float32; the loss must not be infinite for it."""
    head = TinyHead(torch.eye(HIDDEN), torch.eye(HIDDEN))
    hidden = torch.zeros(1, 2, HIDDEN)
    hidden[0, 1, 3] = 500.0
    ids, supervised = torch.tensor([[0, 7]]), torch.tensor([[False, True]])
    assert block_loss(hidden, ids, supervised, head, Weighting("decay"), 1.0).loss.item() == pytest.approx(500.0)
