"""Chats to a trained drafter on the tiny target: through objects, and through the run's own folder."""

import json
from pathlib import Path

from headrace.store.commits import CommitLog
from headrace.store.objects import Objects
from headrace.store.remote_verify import verify_objects
from headrace.testing.tiny_target import save_tiny_target
from tests.integration.test_pipeline import MASK, WORDS, call
from tests.store.conftest import S3

RUN = """
run: {run}
floor: false
target: {{model: {root}/model, dtype: float32, num_taps: 2}}
prepare: {{data: [{root}/chats.jsonl], heldout_fraction: 0.2}}
regenerate: {{max_new_tokens: 12, batch_size: 8}}
order: {{window_samples: 16}}
capture: {{group_tokens: 256, codec: "latent:16x4", fit_tokens: 400}}
store: {{shard_bytes: 6144, at: {at}}}
drafter: {{num_layers: 1, block_size: 4, mask_token_id: {mask}, num_heads: 2, num_kv_heads: 1}}
train: {{epochs: 1, max_steps: 4, step_tokens: 256, micro_tokens: 128, anchors: 4, eval_every: 2, threads: 1,
  tensorboard: false}}
evaluate: {{num_prompts: 2, max_new_tokens: 8}}
"""


def test_a_drafter_trained_through_objects_is_the_same_to_the_bit(s3: S3, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "model")
    rows = [{"prompt": f"{a} {b}"} for a in WORDS for b in WORDS if a != b]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    address, results = s3.address(), {}
    for name, at in [("local", "null"), ("objects", address)]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(RUN.format(run=tmp_path / name, root=tmp_path, at=at, mask=MASK))
        results[name] = json.loads(call("run", str(file), "--json"))
    assert len(Objects(address).sizes("shards")) > 3
    assert list((tmp_path / "objects" / "states" / "shards").iterdir()) == []
    for key in ("bytes_raw", "bytes_stored", "tau"):
        assert results["objects"][key] == results["local"][key], key
    for name in ("model.safetensors", "config.json"):
        ours, theirs = ((tmp_path / run / "drafter" / name).read_bytes() for run in ("objects", "local"))
        assert ours == theirs, name
    assert verify_objects(address) == []
    # Elsewhere, with nothing but the prepared set: the states come from the address, basis included.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "local" / "prepared").rename(elsewhere / "prepared")
    file.write_text(RUN.format(run=elsewhere, root=tmp_path, at=address, mask=MASK))
    call("train", str(file))
    call("export", str(file))
    ours, theirs = (
        (folder / "drafter" / "model.safetensors").read_bytes() for folder in (elsewhere, tmp_path / "objects")
    )
    assert ours == theirs
    state = CommitLog(Objects(address)).read()
    call("capture", str(tmp_path / "objects.yaml"))
    after = CommitLog(Objects(address)).read()
    assert state is not None
    assert after is not None
    assert after.blocks == state.blocks  # nothing was missing, nothing was made
