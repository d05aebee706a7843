"""The model card says what was measured, and nothing of this machine."""

import json
from pathlib import Path

from headrace.config import RunFile
from headrace.export.card import write_card
from headrace.export.zlab import export_zlab
from headrace.files import write_json
from tests.evaluate.conftest import Pair
from tests.train.runs import make_run, run_file


def test_a_card_names_target_shape_recipe_and_data(pair: Pair, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", pair.target.folder)
    export_zlab(pair.drafter, folder.export)
    cfg = run_file(tmp_path / "run", pair.target.folder)
    text = write_card(cfg, folder, {"vllm": "vllm serve it"}).read_text()
    assert "Not measured yet" in text
    assert "vllm serve it" in text
    assert "output of blocks 1, 3 of 5" in text
    assert "12 samples of demo; 2 more held out" in text
    assert "optimizer muon, peak_lr 0.005" in text
    assert str(tmp_path) not in text
    assert "base_model" not in text  # a local folder is no model of the hub


def test_measured_figures_come_with_their_floors(pair: Pair, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", pair.target.folder)
    export_zlab(pair.drafter, folder.export)
    results = {
        "tau": 2.345, "tau_interval": [2.1, 2.6], "tau_no_features": 1.2, "tau_prompt_lookup": None,
        "tau_untrained": 1.0, "num_prompts": 7, "greedy_identical": True, "per_task": {"maths": {"tau": 2.5}},
    }  # fmt: skip
    folder.evaluation.mkdir()
    write_json(folder.evaluation / "results.json", results)
    cfg = RunFile.model_validate({**json.loads(run_file(tmp_path / "run", pair.target.folder).model_dump_json()),
                                  "target": {"model": "owner/big"}})  # fmt: skip
    text = write_card(cfg, folder, {}).read_text()
    assert "| τ of this drafter | 2.345 (2.100 to 2.600) |" in text
    assert "| the same drafter without target states | 1.200 |" in text
    assert "| τ on maths | 2.500 |" in text
    assert "prompt lookup" not in text
    assert "base_model: owner/big" in text
    assert "identical to the target's own" in text
