"""Every stage in order on a tiny random target: chats to report, twice, and through the commands."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.drafter.stock import load_stock
from headrace.testing.tiny_target import save_tiny_target

WORDS = [f"w{n}" for n in range(20, 30)]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    save_tiny_target(root / "model")
    rows = [{"prompt": f"{a} {b}", "source": f"kind {int(a[1:]) % 2}"} for a in WORDS for b in WORDS if a != b]
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
drafter: {{num_layers: 1, block_size: 4, mask_token_id: {MASK}, num_heads: 2, num_kv_heads: 1}}
train: {{epochs: 1, max_steps: 4, step_tokens: 256, micro_tokens: 128, anchors: 4, eval_every: 2, threads: 1,
  autocast: false, tensorboard: false}}
evaluate: {{num_prompts: 4, max_new_tokens: 12}}
"""
    )
    return path


MASK = 5


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_run_goes_from_chats_to_a_report_and_skips_what_is_done(run_file: Path) -> None:
    folder = run_file.parent / "run"
    results = json.loads(call("run", str(run_file), "--json"))
    assert results["num_prompts"] == 4
    assert results["greedy_identical"] is True
    assert results["tau"] >= 1
    assert results["tau_no_features"] >= 1
    assert results["bytes_stored"] > results["bytes_raw"] > 0
    assert json.loads((folder / "results.json").read_text())["tau"] == results["tau"]
    assert "<svg" in (folder / "report.html").read_text()
    assert (folder / "states" / "run.resolved.yaml").exists()
    written = {p: p.stat().st_mtime_ns for p in folder.rglob("*.arrow")}
    again = json.loads(call("run", str(run_file), "--json"))
    assert again["tau"] == results["tau"]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.arrow")} == written


def test_the_exported_folder_has_the_trainers_tau(run_file: Path) -> None:
    folder = run_file.parent / "run"
    call("run", str(run_file))
    own = json.loads(call("eval", str(run_file), "--json"))
    exported = json.loads(call("eval", str(run_file), "--json", "--drafter", str(folder / "drafter")))
    assert exported["tau"] == pytest.approx(own["tau"], abs=0.05)
    assert exported["greedy_identical"] is True
    assert not any(torch.isnan(p).any() for p in load_stock(folder / "drafter").parameters())


def test_a_sample_is_shown(run_file: Path) -> None:
    call("run", str(run_file))
    assert "tokens trained" in call("show", str(run_file), "--row", "3")
    assert "by source" in call("show", str(run_file), "--stats")
    told = json.loads(call("show", str(run_file), "--stats", "--json").splitlines()[-1])
    assert told["roles"]["user"]["trained"] == 0
    assert told["roles"]["assistant"]["trained"] > 0


def test_a_changed_setting_is_refused_by_name(run_file: Path) -> None:
    call("run", str(run_file))
    result = CliRunner().invoke(app, ["train", str(run_file), "--set", "train.lr=0.5"])
    assert result.exit_code == 2
    assert "train.lr" in result.stderr


def test_a_run_is_planned_from_measured_rates_and_checked_afterwards(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.trial.RUN_SECONDS", 0.05)
    folder = run_file.parent / "run"
    planned = json.loads(call("plan", str(run_file), "--measure", "--json"))
    assert planned["figures"]["train_s"]["modelled"] is False
    assert (folder / "plan.json").exists()
    assert not (folder / "trial").exists()
    rows = {row["name"]: row for row in json.loads(call("plan", "--check", str(folder), "--json"))}
    assert {"total_bytes", "stored_bytes", "capture_s", "train_s"} <= set(rows)
    assert rows["total_bytes"]["ok"]
    assert "planned" in call("plan", "--check", str(folder))
    call("report", str(run_file))
    assert "Planned and real" in (folder / "report.html").read_text()
