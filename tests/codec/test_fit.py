"""A fit finds the directions that matter, leaves massive tokens aside, and says what it cannot do."""

from collections.abc import Iterator

import pytest
import torch

from headrace.codec.fit import fit_latent, measure_moments, water_fill
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError

TAPS, HIDDEN, RANK = 2, 16, 6
SPEC = CodecSpec("raw", 0, TAPS, HIDDEN, "bfloat16")


def slice_of(num_samples: int = 40, massive: bool = True, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """States in a subspace of RANK dimensions plus a little noise, taps of other norms, first tokens massive."""
    random = torch.Generator().manual_seed(seed)
    inside = torch.linalg.qr(torch.randn(TAPS * HIDDEN, RANK, generator=torch.Generator().manual_seed(9)))[0]
    found = []
    for number in range(num_samples):
        x = torch.randn(12, RANK, generator=random) @ inside.T + 0.02 * torch.randn(12, TAPS * HIDDEN, generator=random)
        own = x.view(12, TAPS, HIDDEN) * torch.tensor([1.0, 20.0])[:, None]
        if massive and number % 4 == 0:
            own[0] *= 300
        found.append((f"source {number % 2}", own.bfloat16()))
    return found


def moments_of(samples: list[tuple[str, torch.Tensor]]):  # type: ignore[no-untyped-def]
    def states() -> Iterator[tuple[str, torch.Tensor]]:
        yield from samples

    return measure_moments(states)


def residual(codec: QuantisedCodec, samples: list[tuple[str, torch.Tensor]]) -> float:
    """Share of the scaled states' energy that is lost."""
    assert codec.basis is not None
    lost = total = 0.0
    for _, own in samples:
        scale = codec.basis.inverse_rms_L[:, None]
        back = codec.reconstruct(codec.features(codec.encode(own), len(own)).float())
        lost += float(((back - own.float()) * scale).square().sum())
        total += float((own.float() * scale).square().sum())
    return lost / total


def test_massive_tokens_are_counted_and_change_no_moment() -> None:
    plain, spiked = moments_of(slice_of(massive=False)), moments_of(slice_of())
    assert (plain.num_escaped, spiked.num_escaped) == (0, 10)
    assert spiked.escape_share == pytest.approx(10 / 480)
    torch.testing.assert_close(spiked.inverse_rms_L, plain.inverse_rms_L, rtol=0.05, atol=0)
    assert spiked.by_source == {"source 0": 240, "source 1": 240}


@pytest.mark.parametrize("scheme", ["rotate", "water"])
def test_the_subspace_of_the_states_is_found(scheme: str) -> None:
    samples = slice_of(massive=False)
    spec, basis = fit_latent(moments_of(samples), SPEC, RANK, 8, scheme=scheme)  # type: ignore[arg-type]
    assert basis.told["energy_kept"] > 0.98
    assert residual(QuantisedCodec(spec, basis), slice_of(massive=False, seed=5)) < 0.02
    worse, fewer = fit_latent(moments_of(samples), SPEC, RANK // 2, 8)
    assert residual(QuantisedCodec(worse, fewer), samples) > 0.2


def test_rows_are_orthonormal_and_strongest_first_in_water() -> None:
    _, basis = fit_latent(moments_of(slice_of()), SPEC, 8, 4, scheme="water")
    assert basis.projection_RW is not None
    torch.testing.assert_close(basis.projection_RW @ basis.projection_RW.T, torch.eye(8), atol=1e-4, rtol=0)


def test_directions_that_fc_reads_beat_the_strongest_for_fc() -> None:
    samples = slice_of()
    moments = moments_of(samples)
    weak = torch.linalg.qr(torch.randn(TAPS * HIDDEN, 3, generator=torch.Generator().manual_seed(4)))[0].T
    fc = (weak * moments.inverse_rms_L.repeat_interleave(HIDDEN)).contiguous()
    lost = []
    for reads in (fc, None):
        spec, basis = fit_latent(moments, SPEC, 3, 8, fc_HW=reads)
        codec = QuantisedCodec(spec, basis)
        own = torch.cat([x for _, x in samples]).float()
        own = own[~codec.escaped(own)]
        full = own.flatten(1) @ fc.T
        back = codec.reconstruct(codec.coordinates(own)).flatten(1) @ fc.T
        lost.append(float((full - back).square().sum() / full.square().sum()))
    assert lost[0] < 1e-6
    assert lost[1] > 0.05


def test_water_goes_where_the_energy_is_and_stays_within_its_budget() -> None:
    energy = torch.tensor([64.0] * 8 + [1.0] * 8 + [0.01] * 8)
    groups = water_fill(energy, 4.0, group=8)
    assert [size for size, _ in groups] == [8, 8, 8]
    bits = [b for _, b in groups]
    assert bits == sorted(bits, reverse=True)
    assert sum(size * b for size, b in groups) <= 4 * 24
    with pytest.raises(CodecError, match="fewer directions"):
        water_fill(energy, 1.0)


def test_what_cannot_be_fitted_is_refused() -> None:
    moments = moments_of(slice_of(num_samples=2, massive=False))
    with pytest.raises(CodecError, match="at least 32 tokens"):
        fit_latent(moments, SPEC, 8, 4)
    enough = moments_of(slice_of())
    with pytest.raises(CodecError, match="rank from 1 to 32"):
        fit_latent(enough, SPEC, 33, 4)
    with pytest.raises(CodecError, match="bits"):
        fit_latent(enough, SPEC, 8, 4.5)
    with pytest.raises(CodecError, match="no token"):
        moments_of([])
    with pytest.raises(CodecError, match="zero everywhere"):
        moments_of([("a", torch.zeros(5, TAPS, HIDDEN))])
    half = [("a", own * torch.where(torch.arange(12) % 3 == 0, 500.0, 1.0)[:, None, None]) for _, own in slice_of()]
    with pytest.raises(CodecError, match="massive"):
        moments_of(half)
