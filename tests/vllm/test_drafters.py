"""Exported drafters served by real vLLM on the CPU: the same answers in the same number of passes as decoded here."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import TargetConfig
from headrace.drafter.draft_vocabulary import DraftVocabulary, covered, draft_ids, reduced
from headrace.drafter.model import Drafter
from headrace.drafter.speculators import load_any
from headrace.evaluate.decode import Decoded, decode
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.export.profiles import PROFILES
from headrace.export.speculators import export_speculators
from headrace.export.zlab import export_zlab
from headrace.target.head import load_head
from headrace.target.transformers_target import load_target
from headrace.testing.tiny_target import NUM_BLOCKS, VOCAB_SIZE, save_tiny_target
from tests.evaluate.conftest import BLOCK, LIMIT, TAPS, Pair, prompts, shape, taught
from tests.vllm.servers import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SIDE = Path(__file__).parent / "drafters_side.py"
HIDDEN, HEAD = 128, 64  # heads that its kernels for CPUs take
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a drafter that learned its answers well, so that passes depend on every slot."""
    sizes = {"hidden_size": HIDDEN, "head_dim": HEAD, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_tiny_target(tmp_path_factory.mktemp("wide") / "model", "qwen3", tied=False, **sizes)
    target = load_target(TargetConfig(model=str(folder), dtype="float32"))
    head = load_head(folder, target.model.config).to("cpu", torch.float32)
    of = replace(
        shape(), hidden_size=HIDDEN, head_dim=HEAD, num_heads=2, num_kv_heads=1, num_features=len(TAPS) * HIDDEN
    )
    return Pair(target, head, taught(target, head, 150, of, lr=2e-3), prompts(24, seed=1)[:8])


@pytest.fixture(scope="module")
def sliding(wide: Pair) -> Drafter:
    """Another one, of layers that see little, and nothing later in their block."""
    sizes = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "sliding_causal": True}
    return taught(wide.target, wide.head, 150, replace(wide.drafter.shape, **sizes), lr=2e-3)


@pytest.fixture(scope="module")
def exported(wide: Pair, sliding: Drafter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both layouts, of the whole vocabulary and of three quarters of it."""
    root = tmp_path_factory.mktemp("drafters")
    ids = torch.tensor([token for token in range(VOCAB_SIZE) if token % 4])
    every = np.ones(VOCAB_SIZE, np.int64)
    vocabulary = DraftVocabulary(ids, covered(ids, every, every))
    small = Drafter(vocabulary.shape(wide.drafter.shape))
    small.load_state_dict(wide.drafter.state_dict(), strict=False)
    vocabulary.give(small)
    for name, drafter in (("whole", wide.drafter), ("reduced", small)):
        export_zlab(drafter, root / f"{name}-zlab", head=wide.head)
        target = str(wide.target.folder)
        export_speculators(drafter, root / f"{name}-speculators", target, ["Qwen3ForCausalLM"], head=wide.head)
    export_zlab(sliding, root / "sliding-zlab", head=wide.head)
    return {folder.name: folder for folder in sorted(root.iterdir())}


@pytest.fixture(scope="module")
def served(wide: Pair, exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("served")
    given = {
        "target": str(wide.target.folder), "drafters": {name: str(folder) for name, folder in exported.items()},
        "prompts": wide.prompts, "limit": LIMIT, "num_drafted": BLOCK - 1,
    }  # fmt: skip
    (root / "inputs.json").write_text(json.dumps(given))
    command = [vllm_python(), str(SIDE), str(root / "inputs.json"), str(root / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **CPU})
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((root / "out.json").read_text())
    return found


def decoded(pair: Pair, folder: Path) -> list[Decoded]:
    drafter = load_any(folder, NUM_BLOCKS)
    proposer = DrafterProposer(drafter, reduced(pair.head, draft_ids(drafter)))
    answers = []
    for ids in pair.prompts:
        with LiveVerifier(pair.target, proposer.taps) as live:
            answers.append(decode(live, proposer, ids, LIMIT, pair.target.stop_ids, Sampling()))
    return answers


@pytest.mark.parametrize(
    "name", ["reduced-speculators", "reduced-zlab", "sliding-zlab", "whole-speculators", "whole-zlab"]
)
def test_vllm_gives_the_same_answers_in_as_many_passes(
    wide: Pair, exported: dict[str, Path], served: dict[str, Any], name: str
) -> None:
    ours = decoded(wide, exported[name])
    assert served[name]["ids"] == [answer.ids for answer in ours]
    num_passes = sum(len(answer.gained) for answer in ours)
    assert served[name]["num_drafts"] == num_passes
    assert sum(sum(answer.gained) for answer in ours) > 1.5 * num_passes


def test_the_two_vocabularies_differ_so_that_the_check_can_fail(served: dict[str, Any]) -> None:
    assert served["reduced-zlab"]["num_drafts"] > served["whole-zlab"]["num_drafts"]
    assert served["reduced-zlab"]["ids"] == served["whole-zlab"]["ids"]


def test_a_window_is_seen_so_that_the_check_can_fail(
    wide: Pair, sliding: Drafter, served: dict[str, Any], tmp_path: Path
) -> None:
    for changes in ({"sliding_window": 60}, {"sliding_causal": False}):
        other = Drafter(replace(sliding.shape, **changes))
        other.load_state_dict(sliding.state_dict())
        export_zlab(other, tmp_path, head=wide.head)
        assert sum(len(a.gained) for a in decoded(wide, tmp_path)) != served["sliding-zlab"]["num_drafts"], changes


def test_the_profile_says_that_it_was_served() -> None:
    assert not PROFILES["vllm"].static
