"""Every family by its transformers class: taps, ends and identity on tiny random models of its layout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config import TargetConfig
from headrace.drafter.model import head_logits
from headrace.prepare.model_files import load_config
from headrace.taps import EMBEDDING, FINAL_POST_NORM, FINAL_PRE_NORM, Tap, from_transformers
from headrace.target.head import load_head
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.tiny_target import FAMILIES, NUM_BLOCKS, Family, save_tiny_target

IDS = np.random.default_rng(0).integers(3, 64, 20).astype(np.int32)
TAPS = [EMBEDDING, *(Tap("after_block", i) for i in range(NUM_BLOCKS)), FINAL_PRE_NORM, FINAL_POST_NORM]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    family: Family = request.param
    # Untied where that is usual, a vocabulary padded beyond the tokenizer's 64 words.
    tied = family.startswith("gemma") or family in ("llama3", "qwen2")
    folder = save_tiny_target(tmp_path_factory.mktemp(family), family, tied=tied, vocab_size=72)
    return load_target(TargetConfig(model=str(folder), dtype="float32", device="cpu"))


def test_taps_through_hooks_are_output_hidden_states(target: TransformersTarget) -> None:
    states_TLH = target.states([IDS], TAPS, len(IDS))[0]
    with torch.inference_mode():
        out = target.model(input_ids=torch.from_numpy(IDS.astype(np.int64))[None], output_hidden_states=True)
    assert len(out.hidden_states) == NUM_BLOCKS + 1
    for number, theirs in enumerate(out.hidden_states):
        ours = states_TLH[:, TAPS.index(from_transformers(number, NUM_BLOCKS))]
        torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-5)
    assert len({states_TLH[:, n].sum().item() for n in range(NUM_BLOCKS + 1)}) == NUM_BLOCKS + 1
    assert torch.equal(states_TLH[:, NUM_BLOCKS], states_TLH[:, NUM_BLOCKS + 1])


def test_padding_and_company_do_not_reach_a_sample(target: TransformersTarget) -> None:
    alone = target.states([IDS], TAPS, len(IDS))[0]
    together = target.states([IDS[:7], IDS], TAPS, 48)
    torch.testing.assert_close(together[1], alone, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(together[0], alone[:7], rtol=2e-3, atol=2e-3)


def test_the_frozen_ends_give_the_targets_own_embeddings_and_logits(target: TransformersTarget) -> None:
    ids = torch.from_numpy(IDS.astype(np.int64))
    head = load_head(target.folder, load_config(target.folder))
    states_TLH = target.states([IDS], [EMBEDDING, FINAL_PRE_NORM], len(IDS))[0]
    with torch.inference_mode():
        logits_TV = target.model(input_ids=ids[None]).logits[0].float()
    embedded = head.embedding_VH[ids] * head.embedding_scale
    torch.testing.assert_close(embedded, states_TLH[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head_logits(head.normed(states_TLH[:, 1]), head), logits_TV, rtol=1e-4, atol=1e-4)
    assert head.embedding_VH.shape == (72, 32)
    tied = target.model.config.get_text_config().tie_word_embeddings
    assert head.tied == tied


def test_the_identity_is_the_text_parts(target: TransformersTarget) -> None:
    spec = target.spec
    assert (spec.num_blocks, spec.hidden_size, spec.vocab_size) == (NUM_BLOCKS, 32, 72)
    assert spec.quantisation == "none"


def test_a_multimodal_folder_keeps_its_nested_names(tmp_path: Path) -> None:
    from headrace.target.weights import Weights

    for family in ("qwen3_5", "gemma3"):
        where = Weights(save_tiny_target(tmp_path / family, family)).where  # type: ignore[arg-type]
        assert any("language_model" in key for key in where), family
        assert any("vision" in key or "visual" in key for key in where), family
