"""A drafter that reads a codec's coordinates and its exported form that reads raw taps draft the same, to 1e-5."""

import dataclasses

import pytest
import torch

from headrace.codec.base import Codec
from headrace.codec.quantised import QuantisedCodec
from headrace.drafter.model import Drafter, head_logits
from headrace.train.load import as_served
from tests.codec.ladder import WIDTH, codecs, named, states
from tests.drafter.tiny import ids_of, tiny_head, tiny_sample, tiny_shape

ANCHORS = torch.tensor([6, 8, 9, 15])


@pytest.mark.parametrize("codec", codecs(), ids=named)
@torch.no_grad()
def test_the_served_form_gives_the_same_block_logits(codec: Codec) -> None:
    sample, _ = tiny_sample()
    own = states(sample.num_tokens, seed=3).float()
    z_TF = codec.coordinates(own) if isinstance(codec, QuantisedCodec) else own.flatten(1)
    drafter = Drafter(dataclasses.replace(tiny_shape(), num_features=codec.num_features), seed=1)
    drafter.feature_scale.copy_(torch.rand(codec.num_features, generator=torch.Generator().manual_seed(0)) + 0.5)
    served = as_served(drafter, codec)
    assert served.shape.num_features == WIDTH
    inputs = [ANCHORS], [ids_of(sample)], tiny_head()
    expected = head_logits(drafter([z_TF], *inputs), tiny_head())
    found = head_logits(served([own.flatten(1)], *inputs), tiny_head())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
