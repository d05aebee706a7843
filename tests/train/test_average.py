"""The average follows the weights, and lends itself without changing them."""

import pytest
import torch

from headrace.train.average import WeightAverage


def test_the_average_follows_with_a_decay_that_rises_to_what_was_asked() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
    average = WeightAverage(module, decay=0.5)
    expected = 0.0
    for number in range(1, 30):
        with torch.no_grad():
            module.weight.fill_(float(number))
        average.update(module, number)
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * number
        assert float(average.weights["weight"]) == pytest.approx(expected, rel=1e-5)


def test_the_module_has_its_own_weights_back_afterwards_also_after_an_error() -> None:
    module = torch.nn.Linear(3, 2)
    own = module.weight.detach().clone()
    average = WeightAverage(module, 0.9)
    average.weights["weight"].zero_()

    def fail() -> None:
        with average.used(module):
            assert not module.weight.any()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.equal(module.weight, own)


def test_frozen_parameters_are_left_out() -> None:
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert set(WeightAverage(module, 0.9).weights) == {"weight"}
