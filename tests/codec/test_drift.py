"""Records unlike those of the fit are counted, by source; ordinary ones raise no alarm."""

from pathlib import Path

import torch

from headrace.codec.base import RawCodec
from headrace.codec.drift import Drift, lost_share
from headrace.codec.fit import fit_latent, measure_moments
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.spec import CodecSpec

L, H, RANK = 2, 16, 8
RAW = CodecSpec("raw", 0, L, H, "float32")


def states(seed: int, directions: torch.Tensor, noise: float = 0.1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(60, len(directions), generator=random) @ directions
    return (x + noise * torch.randn(60, L * H, generator=random)).view(60, L, H)


def directions(seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(L * H, RANK, generator=torch.Generator().manual_seed(seed)))[0].T


def fitted() -> QuantisedCodec:
    slice_ = [("math", states(seed, directions(0))) for seed in range(10)]
    return QuantisedCodec(*fit_latent(measure_moments(lambda: slice_), RAW, RANK, 8))


def test_states_like_those_of_the_fit_raise_no_alarm() -> None:
    drift = Drift.of(fitted())
    assert drift is not None
    for seed in range(20, 40):
        drift.see(seed, "math", states(seed, directions(0)))
    assert drift.note() is None
    found = drift.summary()
    assert found["num_records"] == 20
    assert not found["drifted"]
    assert abs(found["lost"] - found["fitted"]) < 0.5 * found["fitted"]


def test_states_in_other_directions_do_and_are_named_by_source() -> None:
    drift = Drift.of(fitted())
    assert drift is not None
    for seed in range(20, 40):
        drift.see(seed, "math", states(seed, directions(0)))
    for seed in range(40, 44):
        drift.see(seed, "code", states(seed, directions(1)))
    note = drift.note()
    assert note is not None
    assert "code 4 of 4" in note
    assert "math" not in note
    found = drift.summary()
    assert found["drifted"] == {"code": 4}
    assert found["worst_row"] in range(40, 44)


def test_a_few_strange_records_of_a_source_raise_no_alarm() -> None:
    drift = Drift.of(fitted())
    assert drift is not None
    for seed in range(20, 30):
        drift.see(seed, "math", states(seed, directions(int(seed == 20))))
    assert drift.summary()["drifted"] == {"math": 1}
    assert drift.note() is None


def test_escaped_tokens_do_not_count() -> None:
    codec, own = fitted(), states(50, directions(0))
    plain = lost_share(codec, own[1:])
    own[0] = 1e3
    assert abs(lost_share(codec, own) - plain) < 1e-6
    assert lost_share(codec, own[:1]) == 0.0


def test_codecs_that_cannot_drift_have_no_count(tmp_path: Path) -> None:
    assert Drift.of(RawCodec(RAW)) is None
