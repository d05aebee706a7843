"""The live target crops its cache; the replayed one knows only its own answer."""

import pytest
import torch

from headrace.errors import EvaluateError
from headrace.evaluate.decode import Plain
from headrace.evaluate.verify import LiveVerifier, ReplayVerifier
from tests.evaluate.conftest import TAPS, Pair


def test_a_cropped_cache_goes_on_as_if_nothing_had_been_fed(pair: Pair) -> None:
    ids = pair.prompts[0]
    with torch.inference_mode(), LiveVerifier(pair.target, TAPS) as live, LiveVerifier(pair.target, ()) as other:
        live.feed(ids)
        live.feed([11, 12, 13])
        live.keep(len(ids) + 1)
        other.feed([*ids, 11])
        torch.testing.assert_close(live.feed([9]).logits_TV, other.feed([9]).logits_TV, atol=1e-4, rtol=1e-4)
        with pytest.raises(EvaluateError, match="at most"):
            live.keep(99)


def test_taps_are_the_states_of_a_whole_forward(pair: Pair) -> None:
    ids = pair.prompts[0]
    with torch.inference_mode():
        with LiveVerifier(pair.target, TAPS) as live:
            parts = [live.feed(ids[:2]).states_TLH, live.feed(ids[2:]).states_TLH]
        whole = pair.target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    found = torch.cat(parts)  # type: ignore[arg-type]
    for column, block in enumerate((1, 3)):
        torch.testing.assert_close(found[:, column], whole[block + 1][0], atol=1e-4, rtol=1e-4)
        assert (found[:, column] - whole[block][0]).norm() > 0.05 * whole[block][0].norm(), "off by one was not caught"


def test_hooks_are_gone_after_use(pair: Pair) -> None:
    def num_hooks() -> int:
        return sum(len(module._forward_hooks) for module in pair.target.model.modules())

    before = num_hooks()
    with LiveVerifier(pair.target, TAPS):
        assert num_hooks() > before
    assert num_hooks() == before


def test_a_replay_says_nothing_behind_a_wrong_token() -> None:
    replay = ReplayVerifier(Plain(ids=[5, 6, 7], prompt_ids=[1, 2]))
    assert replay.feed([1, 2], last_only=True).own_ids == [5]
    assert replay.feed([5, 6, 9, 7]).own_ids == [6, 7, -1, -1]
    replay.keep(4)
    assert replay.feed([7]).own_ids == [-1]
