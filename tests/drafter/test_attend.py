"""Both forms of the attention compute the same, for packed samples of different lengths, with and without windows."""

import pytest
import torch

from headrace.drafter.attend import KeysValues, Packing, attend, attend_flex, attend_plain
from headrace.drafter.shape import Window

BLOCK, HEADS, KV, DIM = 4, 4, 2, 16
LENGTHS = [9, 0, 30, 5]
ANCHORS = [[2, 5, 9], [0], [1, 17, 30, 29], []]
WINDOWS = [None, *(Window(size, causal) for size in (1, 3, 8, 100) for causal in (False, True))]
Inputs = tuple[torch.Tensor, KeysValues, list[KeysValues], Packing]


def inputs(device: str = "cpu", grad: bool = False) -> Inputs:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device).requires_grad_(grad)

    num = sum(map(len, ANCHORS))
    contexts = [(draw(n, KV, DIM), draw(n, KV, DIM)) for n in LENGTHS]
    own = (draw(num, BLOCK, KV, DIM), draw(num, BLOCK, KV, DIM))
    anchors = [torch.tensor(at, dtype=torch.long, device=device) for at in ANCHORS]
    return draw(num, BLOCK, HEADS, DIM), own, contexts, Packing(anchors, LENGTHS, BLOCK)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
def test_flex_attention_is_the_plain_form(window: Window | None) -> None:
    queries, own, contexts, packing = inputs()
    expected = attend_plain(queries, own, contexts, packing, window)
    torch.testing.assert_close(attend_flex(queries, own, contexts, packing, window), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(attend(queries, own, contexts, packing, window), expected)


def test_a_mask_is_made_once_for_all_layers_of_a_window() -> None:
    packing = inputs()[3]
    assert packing.mask(Window(3, False)) is packing.mask(Window(3, False))
    assert packing.mask(Window(3, False)) is not packing.mask(None)
    assert packing.mask(Window(3, False)) is not packing.mask(Window(3, True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_are_those_of_the_plain_form_on_a_gpu(window: Window | None) -> None:
    found = []
    for form in (attend_plain, attend_flex):
        queries, own, contexts, packing = inputs("cuda", grad=True)
        leaves = [queries, *own, *(part for context in contexts for part in context)]
        form(queries, own, contexts, packing, window).square().sum().backward()
        found.append([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves])
    for plain, flex in zip(*found, strict=True):
        torch.testing.assert_close(flex, plain, rtol=1e-3, atol=1e-4)
