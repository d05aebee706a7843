"""A store without the tokens that no drafter reads trains the very same drafter."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.prepare.prepared import PreparedSet
from headrace.store.reader import StoreReader
from headrace.testing.tiny_target import save_tiny_target
from tests.integration.test_pipeline import MASK, WORDS, call

SLIDING = "sliding_window: 5, layer_types: [sliding_attention, sliding_attention]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats that end with a user turn, whose tokens no rule but `all` keeps."""
    root = tmp_path_factory.mktemp("rule")
    save_tiny_target(root / "model")
    chats = []
    for a in WORDS:
        for b in WORDS[:4]:
            said = [("user", f"{a} {b} {a} {b}"), ("assistant", f"{b} {b} {a} {a} {b} {a}"), ("user", f"{a} {a} {b}")]
            chats.append({"messages": [{"role": role, "content": content} for role, content in said]})
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return root


def trained(root: Path, name: str, capture: str, train: str = "", drafter: str = "") -> tuple[Path, dict[str, object]]:
    """Prepare, capture and train; the run's folder and the summary of its states."""
    file = root / f"{name}.yaml"
    file.write_text(
        f"""
run: {root}/{name}
floor: false
target: {{model: {root}/model, dtype: float32, num_taps: 2}}
prepare: {{data: [{root}/chats.jsonl], heldout_fraction: 0.2}}
regenerate: {{enabled: false}}
order: {{window_samples: 16}}
capture: {{group_tokens: 256, {capture}}}
drafter: {{num_layers: 2, block_size: 4, mask_token_id: {MASK}, num_heads: 2, num_kv_heads: 1, {drafter}}}
train: {{epochs: 1, max_steps: 4, step_tokens: 256, micro_tokens: 128, anchors: 4, eval_every: 2, threads: 1,
  tensorboard: false, {train}}}
"""
    )
    call("prepare", str(file))
    states = json.loads(call("capture", str(file), "--json"))
    call("train", str(file))
    return root / name, states


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "train" / "last" / "model.safetensors")


@pytest.mark.parametrize(
    ("final", "train", "drafter", "window"),
    [
        ("false", "", "", ""),
        ("true", "objective: kl", "", ""),
        ("false", "scale_taps: false", SLIDING, "window: 5, "),
        ("true", "objective: tv, scale_taps: false", SLIDING, "window: 5, "),
    ],
    ids=["ce", "kl", "ce-window", "tv-window"],
)
def test_needed_tokens_alone_train_the_same_bits(
    root: Path, request: pytest.FixtureRequest, final: str, train: str, drafter: str, window: str
) -> None:
    name = request.node.callspec.id
    whole, told = trained(root, f"{name}-all", f"final_state: {final}", train, drafter)
    needed, kept = trained(root, f"{name}-needed", f"{window}final_state: {final}, tokens: needed", train, drafter)
    assert kept["bytes_stored"] < 0.95 * told["bytes_stored"]  # type: ignore[operator]
    own, other = weights(whole), weights(needed)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], other[key]) for key in own)


def test_a_window_wider_than_the_layers_see_is_refused_by_name(root: Path) -> None:
    with pytest.raises(AssertionError, match="token rule context/window:5"):
        trained(root, "narrow", "tokens: needed, window: 5")


def test_a_window_where_every_token_is_kept_is_refused(root: Path) -> None:
    with pytest.raises(AssertionError, match=r"capture\.tokens needed"):
        trained(root, "both", "window: 5")


def test_records_of_needed_tokens_lie_in_the_store_as_their_rule_says(root: Path) -> None:
    run, _ = trained(root, "read", "tokens: needed, window: 5", drafter=SLIDING)
    reader, prepared = StoreReader(run / "states"), PreparedSet.open(run / "prepared")
    assert reader.manifest.token_rule == "context/window:5"
    assert any(reader.read(row, prepared.sample_id(row)).segments[0].token_start > 0 for row in reader.rows.tolist())
    reader.close()
