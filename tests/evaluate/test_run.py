"""What the lines of an evaluation add up to, and that it goes on, begins anew or refuses where it should."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.drafter.model import Drafter
from headrace.errors import EvaluateError, TrainError
from headrace.evaluate.run import evaluate, summarise
from headrace.export.zlab import export_zlab
from headrace.kinds import EvaluateConfig
from headrace.prepare.prepared import Draft, write_prepared
from headrace.progress import Silent
from headrace.record import sample_id
from headrace.testing.tiny_target import HIDDEN_SIZE
from headrace.train.checkpoint import Checkpoint, RunState, save_checkpoint
from tests.evaluate.conftest import BLOCK, LIMIT, TAPS, Pair, plain, shape


def line(row: int, gained: list[int], verdict: str = "same", floors: bool = True) -> dict[str, Any]:
    passes = {"gained": gained, "offered": [3] * len(gained)}
    single = {"gained": [1] * sum(gained), "offered": [3] * sum(gained)}
    made: dict[str, Any] = {
        "row": row, "source": f"kind {row % 2}", "tokens": sum(gained) + 1, "plain_tokens": sum(gained) + 1,
        "drafter": passes, "seconds": {"plain": 2.0, "speculative": 1.0}, "identity": {"verdict": verdict},
        "floors": {"untrained": single, "prompt_lookup": single},
    }  # fmt: skip
    if floors:
        made["floors"]["no_features"] = single
    return made


LINES = [line(0, [4, 2]), line(1, [3, 1]), line(2, [2, 2, 1])]


def test_tau_is_over_all_prompts_and_floors_are_beside_it() -> None:
    results = summarise(LINES, EvaluateConfig())
    assert results["tau"] == pytest.approx(15 / 7)
    assert results["tau_no_features"] == results["tau_untrained"] == 1.0
    assert results["margin_no_features"]["value"] == pytest.approx(15 / 7 - 1, abs=1e-3)
    assert results["margin_no_features"]["low"] > 0
    assert results["per_task"]["kind 0"] == {"tau": round(11 / 5, 4), "num_prompts": 2}
    assert results["seconds_plain"] == 6.0
    assert results["num_tokens"] == 18


def test_one_answer_that_differs_is_not_identity_and_ties_are_counted() -> None:
    assert summarise(LINES, EvaluateConfig())["greedy_identical"] is True
    tied = summarise([*LINES, line(3, [2], "tie")], EvaluateConfig())
    assert (tied["greedy_identical"], tied["num_ties"]) == (True, 1)
    assert summarise([*LINES, line(3, [2], "differs")], EvaluateConfig())["greedy_identical"] is False


def test_a_floor_that_was_not_trained_is_none() -> None:
    results = summarise([line(0, [4], floors=False)], EvaluateConfig())
    assert results["tau_no_features"] is None
    assert results["margin_no_features"] is None


def made_run(pair: Pair, root: Path) -> tuple[RunFile, RunFolder]:
    """A run whose prepared set and checkpoints are there, floor included."""
    folder = RunFolder(root)
    drafts = []
    for ids in pair.prompts:
        whole = np.array([*ids, *plain(pair.target, ids).ids], dtype=np.int32)
        mask = (np.arange(len(whole)) >= len(ids)).astype(np.uint8)
        drafts.append(Draft(sample_id(whole, mask), whole, mask, "numbers", heldout=True))
    write_prepared(folder.prepared, drafts, {"fingerprint": "made up"})
    save(folder, pair.drafter, pair.target.spec.weights_hash)
    save(folder, Drafter(replace(shape(), features=False), seed=0), pair.target.spec.weights_hash)
    return RunFile.model_validate({"run": str(root), "evaluate": {"max_new_tokens": LIMIT, "num_prompts": 4}}), folder


def save(folder: RunFolder, drafter: Drafter, weights_hash: str, step: int = 1) -> None:
    spec = CodecSpec("raw", 0, len(TAPS), HIDDEN_SIZE, "float32").to_json()
    told = {"codec": spec, "prepared": "made up"}
    made_from = {"shape": drafter.shape.to_json(), "target": {"weights_hash": weights_hash}, **told}
    state = RunState(step=step, epoch=0, place=0, num_steps=step, made_from=made_from)
    weights = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    save_checkpoint(folder.train(drafter.shape.features), Checkpoint(weights, {}, state), best=True)


def without_seconds(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if not key.startswith("seconds")}


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_an_evaluation_measures_the_drafter_and_each_floor(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    results = evaluate(cfg, folder, pair.target, Silent())
    assert results == json.loads((folder.evaluation / "results.json").read_text())
    assert results["greedy_identical"] is True
    assert results["num_prompts"] == 4
    assert results["tau"] > results["tau_no_features"] >= 1
    assert results["tau"] > results["tau_untrained"] >= 1
    assert len(results["per_slot"]) == BLOCK - 1


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_figures(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    whole = evaluate(cfg, folder, pair.target, Silent())
    path = folder.evaluation / "prompts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:40])
    again = evaluate(cfg, folder, pair.target, Silent())
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert len(path.read_bytes().splitlines()) == 4
    assert without_seconds(again) == without_seconds(whole)


def test_another_drafter_or_floor_is_evaluated_anew(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    first = evaluate(cfg, folder, pair.target, Silent())
    save(folder, Drafter(shape(), seed=5), pair.target.spec.weights_hash, step=2)
    told = Notes()
    second = evaluate(cfg, folder, pair.target, told)
    assert second["tau"] < first["tau"]
    assert any("made anew" in note for note in told.notes)
    save(folder, Drafter(replace(shape(), features=False), seed=6), pair.target.spec.weights_hash, step=2)
    told = Notes()
    evaluate(cfg, folder, pair.target, told)
    assert any("made anew" in note for note in told.notes)


def test_prompts_of_another_prepared_set_are_refused(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    manifest = folder.prepared / "manifest.json"
    manifest.write_text(manifest.read_text().replace("made up", "prepared again"))
    with pytest.raises(TrainError, match="may have been trained on"):
        evaluate(cfg, folder, pair.target, Silent())


def test_a_floor_that_was_trained_for_longer_or_is_not_wanted_is_left_out(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    assert evaluate(cfg, folder, pair.target, Silent())["tau_no_features"] is not None
    unwanted = cfg.model_copy(update={"floor": False})
    assert evaluate(unwanted, folder, pair.target, Silent())["tau_no_features"] is None
    save(folder, Drafter(replace(shape(), features=False), seed=6), pair.target.spec.weights_hash, step=2)
    told = Notes()
    assert evaluate(cfg, folder, pair.target, told)["tau_no_features"] is None
    assert any("left out" in note for note in told.notes)


def test_a_training_that_has_not_ended_is_told(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    (folder.train() / "stage.json").write_text('{"identity": {}, "finished": false, "summary": {}}')
    told = Notes()
    evaluate(cfg, folder, pair.target, told)
    assert any("stopped after step 1 of 1" in note for note in told.notes)


def test_lines_of_an_evaluation_that_lost_its_stage_are_not_mixed_in(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    first = evaluate(cfg, folder, pair.target, Silent())
    path = folder.evaluation / "prompts.jsonl"
    path.write_text(path.read_text().replace('"gained": [', '"gained": [4, '))
    (folder.evaluation / "stage.json").unlink()
    assert evaluate(cfg, folder, pair.target, Silent())["tau"] == first["tau"]


def test_an_exported_folder_has_results_of_its_own(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    own = evaluate(cfg, folder, pair.target, Silent())
    before = (folder.evaluation / "results.json").read_bytes()
    export_zlab(pair.drafter, folder.export)
    exported = evaluate(cfg, folder, pair.target, Silent(), drafter=folder.export)
    assert exported == json.loads((folder.evaluation / "results-export.json").read_text())
    assert exported["tau"] == pytest.approx(own["tau"], abs=0.1)
    assert (folder.evaluation / "results.json").read_bytes() == before


def test_a_drafter_of_another_target_is_refused(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    save(folder, pair.drafter, "of another model", step=2)
    with pytest.raises(TrainError, match="of another model"):
        evaluate(cfg, folder, pair.target, Silent())
    export_zlab(Drafter(replace(shape(), num_target_layers=9), seed=0), folder.export)
    with pytest.raises(EvaluateError, match="9 blocks"):
        evaluate(cfg, folder, pair.target, Silent(), drafter=folder.export)


def test_sampled_answers_have_no_identity_and_no_floors(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    sampled = cfg.model_copy(update={"evaluate": cfg.evaluate.model_copy(update={"temperature": 1.0})})
    results = evaluate(sampled, folder, pair.target, Silent())
    assert results["greedy_identical"] is None
    assert results["tau_prompt_lookup"] is None
    assert results["tau"] >= 1


def test_a_run_without_held_out_prompts_is_refused(pair: Pair, tmp_path: Path) -> None:
    cfg, folder = made_run(pair, tmp_path)
    write_prepared(folder.prepared, [], {"fingerprint": "made up"})
    with pytest.raises(EvaluateError, match="held-out"):
        evaluate(cfg, folder, pair.target, Silent())
