"""speculators' own package on an export, there and back; skipped where no python with it is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.drafter.draft_vocabulary import DraftVocabulary, covered, draft_ids, reduced
from headrace.drafter.model import Drafter, head_logits
from headrace.drafter.speculators import load_any
from headrace.drafter.stock import load_stock
from headrace.errors import ExportError
from headrace.evaluate.decode import decode
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.export.speculators import export_speculators
from headrace.export.zlab import export_zlab
from headrace.testing.tiny_target import VOCAB_SIZE
from tests.evaluate.conftest import BLOCK, LIMIT, TAPS, Pair, plain
from tests.interchange.runs import theirs

SIDE = Path(__file__).parent / "speculators_side.py"


def export(pair: Pair, folder: Path) -> Path:
    export_speculators(pair.drafter, folder, str(pair.target.folder), ["LlamaForCausalLM"])
    return folder


def tau(pair: Pair, folder: Path) -> float:
    """Tokens gained per pass of the drafter in a folder of either layout."""
    proposer = DrafterProposer(load_any(folder, 5), pair.head)
    gained = []
    for ids in pair.prompts:
        with LiveVerifier(pair.target, proposer.taps) as live:
            gained += decode(live, proposer, ids, LIMIT, pair.target.stop_ids, Sampling()).gained
    return sum(gained) / len(gained)


def test_the_config_names_taps_in_their_numbers(pair: Pair, tmp_path: Path) -> None:
    config = json.loads((export(pair, tmp_path) / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK - 1
    assert config["sliding_window_non_causal"] is True, "vLLM makes every layer causal where it is false"
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(pair.target.folder)
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 64


def test_the_same_tensors_as_the_stock_export(pair: Pair, tmp_path: Path) -> None:
    export(pair, tmp_path / "theirs")
    export_zlab(pair.drafter, tmp_path / "stock")
    names = [tmp_path / name / "model.safetensors" for name in ("theirs", "stock")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert load_any(tmp_path / "theirs", 5).shape == load_any(tmp_path / "stock", 5).shape


def test_what_their_layout_cannot_say_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="final_logit_softcapping"):
        export_speculators(pair.drafter, tmp_path / "out", "t", [], scales={"final_logit_softcapping": 30.0})
    windowed = load_any(export(pair, tmp_path / "plain"), 5)
    windowed.shape = replace(windowed.shape, layer_types=("sliding_attention", "full_attention"), sliding_window=4)
    with pytest.raises(ExportError, match="window"):
        export_speculators(windowed, tmp_path / "out", "t", [])
    assert not (tmp_path / "out").exists()


def reduced_pair(pair: Pair) -> tuple[Pair, torch.Tensor]:
    """The pair with a drafter of every other id."""
    ids = torch.arange(1, VOCAB_SIZE, 2)
    every = np.ones(VOCAB_SIZE, np.int64)
    vocabulary = DraftVocabulary(ids, covered(ids, every, every))
    drafter = Drafter(vocabulary.shape(pair.drafter.shape))
    drafter.load_state_dict(pair.drafter.state_dict(), strict=False)
    vocabulary.give(drafter)
    return replace(pair, drafter=drafter, head=reduced(pair.head, ids)), ids


def inputs(pair: Pair, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and ids of an answer, saved for their side."""
    answer = plain(pair.target, pair.prompts[0], TAPS)
    ids = torch.tensor([*answer.prompt_ids, *answer.ids])
    features = torch.cat((answer.states_TLH.flatten(1), torch.zeros(1, 64)))[: len(ids)]
    save_file({"features_TF": features.contiguous(), "ids_T": ids}, path)
    return features, ids


def test_a_reduced_vocabulary_needs_the_targets_head_and_comes_back(pair: Pair, tmp_path: Path) -> None:
    own, ids = reduced_pair(pair)
    with pytest.raises(ExportError, match="head"):
        export(own, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    export_speculators(own.drafter, tmp_path / "out", "t", [], head=pair.head)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == len(ids)
    back = load_any(tmp_path / "out", 5)
    assert torch.equal(draft_ids(back), ids)  # type: ignore[arg-type]
    assert back.shape == own.drafter.shape


@pytest.mark.timeout(1200)
def test_their_package_gives_a_reduced_vocabularys_logits_and_their_checkpoint_the_same_tau(
    pair: Pair, tmp_path: Path
) -> None:
    own, ids = reduced_pair(pair)
    export_speculators(own.drafter, tmp_path / "export", str(pair.target.folder), ["LlamaForCausalLM"], head=pair.head)
    features, words = inputs(pair, tmp_path / "inputs.safetensors")
    theirs(SIDE, str(tmp_path / "export"), str(tmp_path / "inputs.safetensors"), str(tmp_path / "out"))
    back = load_file(tmp_path / "out" / "logits.safetensors")
    anchors = back["places"].view(-1, BLOCK)[:, 0]
    export_zlab(own.drafter, tmp_path / "stock", head=pair.head)
    with torch.no_grad():
        hidden = load_stock(tmp_path / "stock")([features], [anchors], [words], own.head)
    ours = head_logits(hidden, own.head).flatten(0, 1)
    assert ours.shape[-1] == len(ids)
    torch.testing.assert_close(back["logits"], ours, rtol=0, atol=0.05)  # their rows of the head are bfloat16
    saved = load_any(tmp_path / "out" / "checkpoint", 5)
    assert torch.equal(draft_ids(saved), ids)  # type: ignore[arg-type]
    assert tau(own, tmp_path / "out" / "checkpoint") == tau(own, tmp_path / "stock") > 1.0


@pytest.mark.timeout(1200)
def test_their_package_gives_the_same_block_logits_and_their_checkpoint_the_same_tau(
    pair: Pair, tmp_path: Path
) -> None:
    folder = export(pair, tmp_path / "export")
    features, ids = inputs(pair, tmp_path / "inputs.safetensors")
    theirs(SIDE, str(folder), str(tmp_path / "inputs.safetensors"), str(tmp_path / "out"))
    back = load_file(tmp_path / "out" / "logits.safetensors")
    anchors = back["places"].view(-1, BLOCK)[:, 0]
    assert len(set(anchors.tolist())) == 6
    export_zlab(pair.drafter, tmp_path / "stock")
    with torch.no_grad():
        hidden = load_stock(tmp_path / "stock")([features], [anchors], [ids], pair.head)
    ours = head_logits(hidden, pair.head).flatten(0, 1)
    torch.testing.assert_close(back["logits"], ours, rtol=0, atol=1e-4)
    assert ours.std() > 0.1
    saved = tmp_path / "out" / "checkpoint"
    assert "speculators_model_type" in json.loads((saved / "config.json").read_text())
    assert tau(pair, saved) == tau(pair, tmp_path / "stock") > 1.0
