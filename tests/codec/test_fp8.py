"""fp8 rounds to three bits of mantissa, tap by tap."""

import torch

from headrace.codec.registry import open_codec
from headrace.codec.spec import short_spec
from tests.codec.ladder import HIDDEN, TAPS, states


def test_each_number_is_within_a_sixteenth_and_taps_do_not_spoil_each_other() -> None:
    codec = open_codec(short_spec("fp8", TAPS, HIDDEN, "bfloat16"))
    own = torch.randn(50, TAPS, HIDDEN, generator=torch.Generator().manual_seed(0))
    own = (own * torch.tensor([0.01, 1.0, 100.0])[:, None]).bfloat16()
    back = codec.reconstruct(codec.features(codec.encode(own), 50)).float()
    largest_TL1 = own.float().abs().amax(-1, keepdim=True)
    assert bool(((back - own.float()).abs() <= own.float().abs() / 15 + largest_TL1 / 448 / 256).all())


def test_a_scale_is_one_taps_own() -> None:
    codec = open_codec(short_spec("fp8", TAPS, HIDDEN, "bfloat16"))
    own = states(3)
    own[:, 2] *= 1e4
    back = codec.reconstruct(codec.features(codec.encode(own), 3)).float()
    share = (back[:, 0] - own[:, 0].float()).norm() / own[:, 0].float().norm()
    assert float(share) < 0.05
