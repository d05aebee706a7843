"""A drafter of a reduced vocabulary from training to export and back, through the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.config import RunFolder
from headrace.drafter.draft_vocabulary import draft_ids
from headrace.drafter.speculators import load_any
from headrace.drafter.stock import load_stock
from headrace.errors import ExportError, TrainError
from headrace.files import read_stage
from headrace.prepare.prepared import PreparedSet
from headrace.target.weights import Weights
from headrace.testing.tiny_target import EOS_ID, VOCAB_SIZE, save_tiny_target
from headrace.train.load import load_drafter
from tests.integration.test_pipeline import MASK, WORDS, call

SIZE = 20


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reduced")
    save_tiny_target(root / "model", tied=False)
    rows = [{"prompt": f"{a} {b}", "source": "words"} for a in WORDS for b in WORDS if a != b]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = root / "run.yaml"
    path.write_text(
        f"""
run: {root}/run
target: {{model: {root}/model, dtype: float32, num_taps: 2}}
prepare: {{data: [{root}/chats.jsonl], heldout_fraction: 0.2}}
regenerate: {{max_new_tokens: 12, batch_size: 8}}
order: {{window_samples: 16}}
capture: {{group_tokens: 256}}
drafter: {{num_layers: 1, block_size: 4, mask_token_id: {MASK}, num_heads: 2, num_kv_heads: 1,
  draft_vocabulary: {SIZE}}}
train: {{epochs: 1, max_steps: 12, step_tokens: 256, micro_tokens: 128, anchors: 8, eval_every: 6, threads: 1,
  sampled_vocabulary: 256, autocast: false, tensorboard: false, lr: 0.01}}
evaluate: {{num_prompts: 6, max_new_tokens: 12}}
"""
    )
    call("run", str(path))
    call("export", str(path), "--speculators")
    return path


def folder(run_file: Path) -> RunFolder:
    return RunFolder(run_file.parent / "run")


def test_the_ids_are_the_most_frequent_of_the_training_rows_and_the_end_of_a_turn(run_file: Path) -> None:
    own = folder(run_file)
    prepared = PreparedSet.open(own.prepared)
    counts: dict[int, int] = {}
    for row in prepared.rows(heldout=False):
        sample = prepared.sample(int(row))
        for token in sample.input_ids[sample.loss_mask.astype(bool)].tolist():
            counts[token] = counts.get(token, 0) + 1
    counts.pop(EOS_ID, None)
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: (-counts.get(token, 0), token))
    wanted = sorted([EOS_ID, *[token for token in ranked if token != EOS_ID][: SIZE - 1]])
    drafter, _ = load_drafter(own.train() / "last")
    ids = draft_ids(drafter)
    assert ids is not None
    assert ids.tolist() == wanted
    floor, _ = load_drafter(own.train(False) / "last")
    assert torch.equal(floor.d2t, drafter.d2t)  # type: ignore[arg-type]


def test_coverage_is_in_the_summary_the_results_and_the_report(run_file: Path) -> None:
    own = folder(run_file)
    stage = read_stage(own.train())
    assert stage is not None
    found: dict[str, Any] = stage["summary"]["draft_vocabulary"]
    assert found["size"] == SIZE
    assert found["num_outside"] > 0
    assert 0.3 < found["inside"] < 1.0
    results = json.loads((own.root / "results.json").read_text())
    assert results["draft_vocabulary"] == found
    assert f"{found['inside']:.2%}" in (own.root / "report.html").read_text()


def test_the_exported_folder_is_the_same_drafter_with_the_targets_rows(run_file: Path) -> None:
    own = folder(run_file)
    tensors = load_file(own.export / "model.safetensors")
    back, theirs = load_stock(own.export), load_any(own.root / "drafter-speculators", 5)
    trained, _ = load_drafter(own.train() / "last")
    for loaded in (back, theirs):
        assert torch.equal(loaded.d2t, trained.d2t)  # type: ignore[arg-type]
        assert loaded.shape.draft_vocab_hash == trained.shape.draft_vocab_hash
    head = Weights(run_file.parent / "model").read(["lm_head.weight"], "head")
    assert torch.equal(tensors["lm_head.weight"], head[tensors["t2d"]].to(torch.bfloat16))
    evaluated = json.loads(call("eval", str(run_file), "--json"))
    exported = json.loads(call("eval", str(run_file), "--json", "--drafter", str(own.export)))
    assert exported["tau"] == pytest.approx(evaluated["tau"], abs=0.05)
    assert exported["greedy_identical"] is evaluated["greedy_identical"] is True
    assert evaluated["tau"] > 1.0


def test_vllm_is_given_a_command_and_sglang_is_not(run_file: Path) -> None:
    commands = json.loads(call("export", str(run_file), "--json"))["commands"]
    assert commands["vllm"].startswith("vllm serve")
    assert commands["sglang"].startswith("not served as trained: a reduced vocabulary")


@pytest.mark.parametrize("change", ["no mapping", "another id", "other ids held", "another size", "another hash"])
def test_a_mapping_that_is_absent_or_another_is_refused(run_file: Path, tmp_path: Path, change: str) -> None:
    source = folder(run_file).export
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    if change == "no mapping":
        del tensors["d2t"]
    elif change == "another id":
        tensors["d2t"][-1] += 1
    elif change == "other ids held":
        tensors["t2d"][:] = False
    elif change == "another size":
        config["draft_vocab_size"] = SIZE - 1
    else:
        config["draft_vocab_hash"] = "0" * 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"d2t|t2d|hash"):
        load_stock(tmp_path)


def test_a_checkpoint_without_its_mapping_is_refused(run_file: Path, tmp_path: Path) -> None:
    from headrace.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

    found = load_checkpoint(folder(run_file).train() / "last")
    for change in ("gone", "zero"):
        weights = dict(found.weights)
        if change == "gone":
            del weights["d2t"]
        else:
            weights["d2t"] = torch.zeros_like(weights["d2t"])
        where = save_checkpoint(tmp_path / change, Checkpoint(weights, found.moments, found.state), best=True)
        with pytest.raises(TrainError, match=r"d2t|hash"):
            load_drafter(where)


def test_a_warm_start_keeps_the_mapping_or_is_refused_by_name(run_file: Path, tmp_path: Path) -> None:
    start = folder(run_file).root / "drafter-speculators"
    words = ["--set", f"run={tmp_path}/run", "--set", f"drafter.init_from={start}", "--set", "floor=false"]
    for stage in ("prepared", "chats", "states"):
        if (folder(run_file).root / stage).exists():
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / stage).symlink_to(folder(run_file).root / stage)
    refused = CliRunner().invoke(app, ["train", str(run_file), *words, "--set", "drafter.draft_vocabulary=21"])
    assert refused.exit_code != 0
    assert "drafter.draft_vocabulary" in refused.stderr
    for given in (f"{SIZE}", "null"):
        own = tmp_path / f"run-{given}"
        (tmp_path / "run").rename(own)
        call("train", str(run_file), *words, "--set", f"drafter.draft_vocabulary={given}", "--set", f"run={own}")
        drafter, _ = load_drafter(RunFolder(own).train() / "last")
        assert torch.equal(drafter.d2t, load_stock(folder(run_file).export).d2t)  # type: ignore[arg-type]
        own.rename(tmp_path / "run")
