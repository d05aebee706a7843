"""A warm start in a codec's coordinates folds back to the drafter it came from."""

from dataclasses import replace

import pytest
import torch

from headrace.codec.base import Codec
from headrace.drafter.model import Drafter
from headrace.drafter.warm import start_from
from headrace.errors import DrafterError
from tests.codec.ladder import HIDDEN, TAPS, codecs, latent, named
from tests.drafter.tiny import tiny_shape

WIDTH = TAPS * HIDDEN


def started(codec: Codec | None) -> tuple[Drafter, Drafter, float]:
    shape = replace(tiny_shape(), num_features=WIDTH)
    start = Drafter(shape, seed=1)
    fresh = Drafter(shape if codec is None else replace(shape, num_features=codec.num_features), seed=2)
    fresh.feature_scale.copy_(torch.linspace(0.1, 3.0, len(fresh.feature_scale)))
    return start, fresh, start_from(fresh, start, codec)


@pytest.mark.parametrize("codec", [None, *codecs()[:4]], ids=lambda codec: "none" if codec is None else named(codec))
def test_coordinates_that_hold_everything_give_the_same_fc(codec: Codec | None) -> None:
    start, fresh, lost = started(codec)
    fc_HF = fresh.fc.weight.detach() * fresh.feature_scale
    torch.testing.assert_close(fc_HF if codec is None else codec.fold(fc_HF), start.fc.weight.detach())
    assert lost < 1e-5
    for name, parameter in start.named_parameters():
        if name != "fc.weight":
            assert torch.equal(parameter, dict(fresh.named_parameters())[name])


def test_a_latent_keeps_what_its_directions_hold_and_says_what_it_loses() -> None:
    codec = latent()
    _, fresh, lost = started(codec)
    assert 0.0 < lost < 1.0
    inside = Drafter(replace(tiny_shape(), num_features=WIDTH), seed=1)
    with torch.no_grad():
        inside.fc.weight.copy_(codec.fold(torch.randn(inside.fc.weight.shape[0], codec.num_features)))
    assert start_from(fresh, inside, codec) < 1e-4


def test_weights_of_another_shape_are_refused() -> None:
    start = Drafter(replace(tiny_shape(), num_features=WIDTH), seed=1)
    with pytest.raises(DrafterError, match="same shape"):
        start_from(Drafter(replace(tiny_shape(), num_features=WIDTH, intermediate_size=8)), start, None)
