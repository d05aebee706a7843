"""Runs whose states are encoded: what is trained in a codec's coordinates is served from raw taps, with the same τ."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.codec.basis import Basis
from headrace.codec.registry import save_codec
from headrace.codec.spec import CodecSpec, split_groups
from headrace.drafter.stock import load_stock
from headrace.testing.tiny_target import HIDDEN_SIZE, save_tiny_target
from tests.integration.test_pipeline import MASK, WORDS, call

TAPS = 2


def fitted(folder: Path) -> Path:
    """A latent of half the width on a random basis."""
    rank = HIDDEN_SIZE
    random = torch.Generator().manual_seed(0)
    projection = torch.linalg.qr(torch.randn(TAPS * HIDDEN_SIZE, rank, generator=random))[0].T
    spec = CodecSpec("latent", 0, TAPS, HIDDEN_SIZE, "float32", {"groups": split_groups(rank, 6, 16)})
    save_codec(spec, Basis(torch.ones(TAPS), torch.full((rank,), 0.1), projection, 1e6), folder)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("codecs")
    save_tiny_target(root / "model")
    rows = [{"prompt": f"{a} {b}"} for a in WORDS for b in WORDS if a != b]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fitted(root / "codec")
    return root


def run_file(root: Path, codec: str) -> Path:
    name = codec.replace(":", "-")
    path = root / f"{name}.yaml"
    path.write_text(
        f"""
run: {root}/run-{name}
floor: false
target: {{model: {root}/model, dtype: float32, num_taps: {TAPS}}}
prepare: {{data: [{root}/chats.jsonl], heldout_fraction: 0.2}}
regenerate: {{max_new_tokens: 12, batch_size: 8}}
order: {{window_samples: 16}}
capture: {{group_tokens: 256, codec: "{root / "codec" if codec == "latent" else codec}"}}
drafter: {{num_layers: 1, block_size: 4, mask_token_id: {MASK}, num_heads: 2, num_kv_heads: 1}}
train: {{epochs: 1, max_steps: 4, step_tokens: 256, micro_tokens: 128, anchors: 4, eval_every: 2, threads: 1,
  tensorboard: false}}
evaluate: {{num_prompts: 3, max_new_tokens: 12}}
"""
    )
    return path


@pytest.mark.parametrize("codec", ["lossless", "fp8", "rotated:6", "latent"])
def test_a_run_with_a_codec_is_served_from_raw_taps(prepared: Path, codec: str) -> None:
    file = run_file(prepared, codec)
    folder = Path(json.loads(json.dumps(str(prepared / f"run-{codec.replace(':', '-')}"))))
    results = json.loads(call("run", str(file), "--json"))
    assert results["greedy_identical"] is True
    assert codec == "lossless" or results["bytes_stored"] < results["bytes_raw"]
    drafter = load_stock(folder / "drafter")
    assert drafter.fc.weight.shape == (HIDDEN_SIZE, TAPS * HIDDEN_SIZE)
    exported = json.loads(call("eval", str(file), "--drafter", str(folder / "drafter"), "--json"))
    assert exported["tau"] == results["tau"]
    if codec == "latent":
        assert (folder / "states" / "basis.safetensors").exists()
        assert (folder / "train" / "basis.safetensors").exists()
    again = json.loads(call("run", str(file), "--json"))
    assert again["tau"] == results["tau"]


def test_a_warm_start_says_how_much_of_its_fc_the_directions_lose(prepared: Path) -> None:
    call("run", str(run_file(prepared, "lossless")))
    start, projection = prepared / "run-lossless" / "drafter", load_file(prepared / "codec" / "basis.safetensors")
    words = ["--set", f"run={prepared}/warm", "--set", f"drafter.init_from={start}"]
    result = CliRunner().invoke(app, ["run", str(run_file(prepared, "latent")), *words])
    assert result.exit_code == 0, result.stderr
    told = re.search(r"directions hold ([\d.]+)% and lose ([\d.]+)%", " ".join(result.stderr.split()))
    assert told is not None
    fc, rows = load_stock(start).fc.weight.detach(), projection["projection"].float()
    held = float((fc @ rows.T @ rows).square().sum() / fc.square().sum())
    assert float(told[1]) == pytest.approx(100 * held, abs=0.02)
    assert float(told[2]) == pytest.approx(100 * (1 - held), abs=0.02)
    assert 0.2 < held < 0.8
    again = CliRunner().invoke(app, ["train", str(run_file(prepared, "latent")), *words])
    assert "directions hold" not in again.stderr
