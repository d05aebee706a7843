import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from headrace.errors import TargetError
from headrace.target.rows import ATTENTION, Rows, check_full_attention, row_attention
from headrace.testing.tiny_target import tiny_model


@torch.no_grad()
def test_rows_give_the_logits_of_a_whole_pass_whatever_their_lengths() -> None:
    model = tiny_model("qwen3")
    texts = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    rows = Rows(model, num_rows=3, num_tokens=8)
    with row_attention(model):
        for n, text in enumerate(texts):
            rows.fill([n])
            size = len(text) - 1
            causal, positions = torch.ones(1, 1, size, size, dtype=torch.bool).tril(), torch.arange(size)[None]
            model(torch.tensor([text[:-1]]), attention_mask=causal, position_ids=positions, past_key_values=rows)
        rows.move(1, 2, 3)
        rows.move(0, 1, 5)
        rows.move(2, 0, 3)
        positions, mask = rows.step([3, 5])
        last = torch.tensor([[texts[1][-1]], [texts[0][-1]]])
        out = model(last, attention_mask=mask, position_ids=positions, past_key_values=rows)
    for n, text in enumerate(reversed(texts)):
        torch.testing.assert_close(out.logits[n, 0], model(torch.tensor([text])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_the_models_own_attention_comes_back_even_after_an_error() -> None:
    model = tiny_model()
    own = model.config._attn_implementation
    seen = []

    def fail() -> None:
        with row_attention(model):
            seen.append(model.config._attn_implementation)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == [ATTENTION]
    assert model.config._attn_implementation == own


def test_blocks_that_see_a_window_only_are_refused() -> None:
    sliding = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    for config in (sliding, MistralConfig(sliding_window=8)):
        with pytest.raises(TargetError, match="full attention"):
            check_full_attention(config)
    check_full_attention(MistralConfig(sliding_window=None))
