"""A run's export: stock folder, card, checked commands, speculators' layout, the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RunFile, RunFolder
from headrace.drafter.speculators import load_any
from headrace.export.run import checked_commands, export_run, refresh_card
from headrace.export.zlab import export_zlab
from headrace.files import write_json
from headrace.progress import Silent
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.loop import train
from tests.evaluate.conftest import Pair
from tests.export.test_push import Remembers
from tests.train.runs import make_run, run_file


class Notes(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFolder, list[str]]:
    root = tmp_path_factory.mktemp("export")
    target = save_tiny_target(root / "model")
    folder = make_run(root / "run", target)
    cfg = run_file(root / "run", target, max_steps=2)
    notes = Notes()
    train(cfg, folder, True, notes)
    return cfg, folder, notes.told


def test_training_says_why_the_drafter_has_its_shape(trained: tuple[RunFile, RunFolder, list[str]]) -> None:
    told = "\n".join(trained[2])
    assert "train: drafter.num_heads 4: the target's own" in told
    assert "train: drafter.rope default" in told
    assert "drafter.block_size" not in told  # given in the run file


def test_an_export_has_card_commands_and_theirs_when_asked(trained: tuple[RunFile, RunFolder, list[str]]) -> None:
    cfg, folder, _ = trained
    notes, hub = Notes(), Remembers()
    summary = export_run(cfg, folder, notes, speculators=True, push_to="me/drafter", hub=hub)
    assert summary["pushed"].endswith("commit/1")
    assert summary["commands"]["vllm"].startswith("vllm serve")
    assert any("sglang" in line and "static" in line for line in notes.told)
    assert "Not measured yet" in (folder.export / "README.md").read_text()
    theirs, own = load_any(Path(summary["speculators"]), 5), load_any(folder.export, 5)
    assert theirs.shape == own.shape
    plain = export_run(cfg, folder, notes)
    assert not {"speculators", "pushed"} & set(plain)


def test_the_card_is_written_again_with_what_was_measured(trained: tuple[RunFile, RunFolder, list[str]]) -> None:
    cfg, folder, _ = trained
    refresh_card(cfg, RunFolder(folder.root / "nothing"))
    export_run(cfg, folder, Silent())
    results: dict[str, Any] = {
        "tau": 1.5, "tau_interval": [1.0, 2.0], "num_prompts": 1, "greedy_identical": None, "per_task": {},
    }  # fmt: skip
    folder.evaluation.mkdir(exist_ok=True)
    write_json(folder.evaluation / "results.json", results)
    refresh_card(cfg, folder)
    assert "1.500" in (folder.export / "README.md").read_text()


def test_an_engine_that_would_serve_another_drafter_gets_no_command(pair: Pair, tmp_path: Path) -> None:
    export_zlab(pair.drafter, tmp_path, scales={"input_embedding_scale": 5.0})
    commands = checked_commands("owner/target", tmp_path)
    assert commands["vllm"].startswith("not served as trained: dflash_config.input_embedding_scale 5")
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["input_embedding_scale"] == 5.0
