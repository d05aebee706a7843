import pytest
import torch

from headrace.errors import TargetError
from headrace.taps import Tap
from headrace.target.hooks import PassEnded, Taps, hooked
from headrace.testing.tiny_target import tiny_model

TAP = Tap("after_block", 1)


def test_a_pass_with_stop_ends_at_its_last_tap_and_removes_its_hooks() -> None:
    model = tiny_model()
    with hooked(model, [TAP], stop=True) as seen:
        with pytest.raises(PassEnded):
            model(torch.tensor([[3, 4]]))
        assert seen.take().shape == (1, 2, 1, 32)
    model(torch.tensor([[3, 4]]))


def test_states_are_given_once() -> None:
    seen = Taps([TAP])
    seen.put(TAP, torch.ones(1, 2, 3))
    assert seen.complete
    assert seen.take().shape == (1, 2, 1, 3)
    with pytest.raises(TargetError, match="after_block:1"):
        seen.take()


def test_hooks_go_even_when_one_cannot_be_set() -> None:
    model = tiny_model()
    with pytest.raises(TargetError), hooked(model, [TAP, Tap("after_block", 9)], stop=False):
        pass
    assert not model.model.layers[1]._forward_hooks
