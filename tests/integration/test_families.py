"""Each target family from chats to a drafter that is exported and loaded again, on tiny random models of its layout."""

import json
from pathlib import Path

import pytest
import torch

from headrace.cli import stages
from headrace.config import load_run_file
from headrace.drafter.stock import load_stock
from headrace.progress import Silent
from headrace.testing.tiny_target import FAMILIES, Family, save_tiny_target
from headrace.train.load import as_served, load_codec, load_drafter

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"w{n} w{n + 1}"},
            {"role": "assistant", "content": f"w{n + 2} w5 w6 w7"},
        ]
    }
    for n in range(8, 32)
]


def settings(root: Path, model: Path) -> Path:
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    path = root / "run.yaml"
    path.write_text(
        f"""
run: {root}/run
floor: false
target: {{model: {model}, dtype: float32, device: cpu, num_taps: 2}}
prepare: {{data: [{root}/chats.jsonl], heldout_fraction: 0.2}}
regenerate: {{enabled: false}}
order: {{window_samples: 16}}
capture: {{group_tokens: 128}}
drafter: {{num_layers: 1, block_size: 4}}
train: {{epochs: 9, max_steps: 10, step_tokens: 64, micro_tokens: 64, anchors: 2, eval_every: 10, eval_samples: 2,
  threads: 1, autocast: false, tensorboard: false}}
"""
    )
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_from_chats_to_a_drafter_that_loads(family: Family, tmp_path: Path) -> None:
    tied = family.startswith("gemma") or family in ("llama3", "qwen2")
    model = save_tiny_target(tmp_path / "model", family, tied=tied, vocab_size=72)
    run = stages.Run(load_run_file(settings(tmp_path, model)), Silent())
    stages.prepare(run)
    stages.capture(run)
    trained = stages.train(run)["drafter"]
    exported = stages.export(run)
    assert trained["num_steps"] == exported["step"] == 10
    served = load_stock(run.folder.export)
    own, extras = load_drafter(run.folder.train() / "last")
    assert served.shape.mask_token_id >= 64  # the first row beyond the tokenizer's words
    folded = as_served(own, load_codec(run.folder.train() / "last", extras))
    assert served.shape == folded.shape
    mine = folded.state_dict()
    assert all(torch.equal(tensor, mine[name].bfloat16().float()) for name, tensor in served.state_dict().items())
