"""States that came in from another program train a drafter as those of a capture do."""

import json
from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.testing.tiny_target import save_tiny_target
from tests.integration.test_pipeline import MASK, call
from tests.interchange.runs import captured


def trained(root: Path, run: Path, model: Path) -> dict[str, object]:
    path = root / f"{run.name}.yaml"
    path.write_text(
        f"""
run: {run}
floor: false
target: {{model: {model}, dtype: bfloat16, taps: ["after_block:0", "after_block:2"]}}
order: {{window_samples: 4}}
drafter: {{num_layers: 1, block_size: 4, mask_token_id: {MASK}, num_heads: 2, num_kv_heads: 1}}
train: {{epochs: 2, max_steps: 4, step_tokens: 128, micro_tokens: 64, anchors: 4, eval_every: 2, threads: 1,
  tensorboard: false}}
"""
    )
    found: dict[str, object] = json.loads(call("train", str(path), "--json"))["drafter"]
    return found


def test_an_import_trains_to_the_same_figures_as_the_capture_it_came_from(tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path / "model")
    first = captured(model, tmp_path / "first", heldout=())
    call("store", "export", str(first.root), str(tmp_path / "out"), "--to", "speculators")
    words = ["--from", "speculators", "--target", str(model), "--taps", "vllm:1,3", "--final", "pre_norm"]
    call("store", "import", str(tmp_path / "out"), str(tmp_path / "second"), *words, "--heldout", "0")
    a, b = trained(tmp_path, first.root, model), trained(tmp_path, tmp_path / "second", model)
    assert a["num_steps"] == b["num_steps"] == 4
    metrics = [
        [json.loads(line) for line in (tmp_path / name / "train" / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in metrics]
    assert losses[0]
    assert losses[0] == losses[1]


def test_a_run_goes_on_from_an_import_to_its_report(tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path / "model")
    first = captured(model, tmp_path / "first", heldout=())
    call("store", "export", str(first.root), str(tmp_path / "out"), "--to", "speculators")
    words = ["--from", "speculators", "--target", str(model), "--taps", "vllm:1,3", "--final", "pre_norm"]
    call("store", "import", str(tmp_path / "out"), str(tmp_path / "run"), *words, "--heldout", "0.3")
    trained(tmp_path, tmp_path / "run", model)
    flags = ["--set", "evaluate.max_new_tokens=8"]
    results = json.loads(call("run", str(tmp_path / "run.yaml"), "--json", *flags))
    assert results["greedy_identical"] is True
    assert results["num_prompts"] > 0
    assert results["bytes_raw"] > 0
    card = (tmp_path / "run" / "drafter" / "README.md").read_text()
    assert "samples of speculators's files" in card
    assert "the target's own" not in card.partition("## Data")[2]
    exported = call(
        "eval", str(tmp_path / "run.yaml"), "--json", "--drafter", str(tmp_path / "run" / "drafter"), *flags
    )
    assert abs(json.loads(exported)["tau"] - results["tau"]) < 0.1
    stage = tmp_path / "run" / "states" / "stage.json"
    stage.write_text(json.dumps({**json.loads(stage.read_text()), "finished": False}))
    stopped = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml")])
    assert stopped.exit_code == 2
    assert "headrace store import" in stopped.stderr
