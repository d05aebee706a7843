"""Speculation changes the speed, never the distribution."""

import pytest
import torch

from headrace.errors import EvaluateError
from headrace.evaluate.sampling import Sampling, reject

VOCAB = 8
DRAWS = 20_000


def distribution(seed: int) -> torch.Tensor:
    return torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5, 0)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    wanted = expected * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


def first_tokens(drafted: bool, seed: int) -> torch.Tensor:
    """How often each token comes first after one drafted slot, over many draws."""
    p, q = distribution(1), distribution(2)
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(seed))
    counts = torch.zeros(VOCAB)
    for _ in range(DRAWS):
        draft = sampling.draw(q[None])[0] if drafted else 3
        accepted, following = reject([draft], q[None] if drafted else None, torch.stack((p, p)), sampling)
        counts[draft if accepted else following] += 1
    return counts


@pytest.mark.parametrize("drafted", [True, False])
def test_the_targets_distribution_is_kept(drafted: bool) -> None:
    # 24.3 is the 0.999 quantile of chi-square with 7 degrees of freedom; the seed is fixed.
    assert chi_square(first_tokens(drafted, 0), distribution(1)) < 24.3


def test_the_check_sees_a_rule_that_takes_every_draft() -> None:
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor(sampling.draw(distribution(2).expand(DRAWS, -1))), minlength=VOCAB).float()
    assert chi_square(counts, distribution(1)) > 1000


def test_what_stands_has_the_expected_share() -> None:
    p, q = distribution(1), distribution(2)
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(0))
    stood = sum(reject([sampling.draw(q[None])[0]], q[None], torch.stack((p, p)), sampling)[0] for _ in range(DRAWS))
    assert stood / DRAWS == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.015)


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    p = distribution(1)
    sampling = Sampling(1.0, 1.0, torch.Generator().manual_seed(0))
    for _ in range(200):
        ids = sampling.draw(p.expand(3, -1))
        assert reject(ids, p.expand(3, -1), p.expand(4, -1), sampling)[0] == 3


def test_temperature_and_nucleus_shape_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]])
    torch.testing.assert_close(Sampling(2.0).probabilities(logits), torch.softmax(logits / 2, -1))
    nucleus = Sampling(1.0, 0.7).probabilities(logits)
    assert nucleus[0, 2:].tolist() == [0, 0]
    assert float(nucleus.sum()) == pytest.approx(1)


@pytest.mark.parametrize(("temperature", "top_p"), [(-1.0, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_settings_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(EvaluateError, match="temperature"):
        Sampling(temperature, top_p)
