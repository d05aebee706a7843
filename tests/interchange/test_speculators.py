"""speculators' files: what its own reader makes of ours, and what we make of those its libraries write."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import RunFolder
from headrace.errors import ConfigError, ExportError
from headrace.interchange.incoming import Said
from headrace.interchange.outgoing import Outgoing
from headrace.interchange.peers import export_run, import_run
from headrace.interchange.speculators import STATES, SpeculatorsFolder, file_name
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.reader import StoreReader
from tests.interchange.runs import HELDOUT, LENGTHS, same_states, states_of, theirs

SIDE = Path(__file__).parent / "speculators_side.py"


def sent(run: RunFolder, out: Path, **chosen: bool) -> dict[str, object]:
    return export_run("speculators", run, out, Silent(), **chosen)


def test_its_own_reader_gives_the_same_numbers(run: RunFolder, tmp_path: Path) -> None:
    summary = sent(run, tmp_path / "out")
    assert summary["target_layer_ids"] == [1, 3]  # after_block:0 and :2 in its numbers
    theirs(SIDE, "read", str(tmp_path / "out"), str(tmp_path / "read.pt"))
    found = torch.load(tmp_path / "read.pt", weights_only=True)
    assert found["lengths"] == [size for row, size in enumerate(LENGTHS) if row not in HELDOUT] + [
        LENGTHS[row] for row in HELDOUT
    ]
    outgoing = Outgoing(run)
    assert len(found["samples"]) == len(outgoing.rows) == len(LENGTHS)
    states = states_of(run)
    for row, own in zip(outgoing.rows, found["samples"], strict=True):
        sample = outgoing.prepared.sample(row)
        expected = states[sample.id]
        assert torch.equal(own["hidden_states"], expected[:, :-1].flatten(1))
        assert torch.equal(own["verifier_last_hidden_states"], expected[:, -1])
        assert own["input_ids"].tolist() == sample.input_ids.tolist()
        assert own["loss_mask"].tolist() == sample.loss_mask.tolist()


def test_what_its_libraries_write_comes_in_with_the_same_bits(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    outgoing, states = Outgoing(run), states_of(run)
    rows = []
    for row in reversed(outgoing.rows):
        sample = outgoing.prepared.sample(row)
        ids, mask = torch.from_numpy(sample.input_ids.copy()), torch.from_numpy(sample.loss_mask.copy())
        rows.append({"input_ids": ids, "loss_mask": mask, "states": states[sample.id]})
    torch.save(rows, tmp_path / "rows.pt")
    theirs(SIDE, "write", str(tmp_path / "rows.pt"), str(tmp_path / "data"))
    to = RunFolder(tmp_path / "run")
    found = import_run("speculators", tmp_path / "data", to, Said(tiny, "vllm:1,3", "pre_norm"), Silent())
    assert (found["num_records"], found["num_failed"]) == (len(LENGTHS), 0)
    assert found["taps"] == ["after_block:0", "after_block:2", "final:pre_norm"]
    assert same_states(states_of(to), states)


def test_out_and_in_again_keeps_every_bit(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    to = RunFolder(tmp_path / "back")
    said = Said(tiny, "after_block:0,after_block:2", "pre_norm")
    found = import_run("speculators", tmp_path / "out", to, said, Silent())
    assert same_states(states_of(to), states_of(run))
    assert found == import_run("speculators", tmp_path / "out", to, said, Silent()), "the second time keeps the first"
    here, there = (StoreReader(folder.states).manifest for folder in (run, to))
    assert here.target == there.target


def test_a_killed_export_goes_on(run: RunFolder, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out" / STATES).iterdir()}
    stage = tmp_path / "out" / "stage.json"
    stage.write_text(json.dumps({**json.loads(stage.read_text()), "finished": False, "summary": {}}))
    (tmp_path / "out" / STATES / file_name(3)).unlink()
    kept = tmp_path / "out" / STATES / file_name(2)
    before = kept.stat().st_mtime_ns
    sent(run, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / STATES).iterdir()} == whole
    assert kept.stat().st_mtime_ns == before


def test_the_held_out_share_is_what_its_trainer_splits_off(run: RunFolder, tmp_path: Path) -> None:
    summary = sent(run, tmp_path / "out", states=False)
    ratio = summary["train_data_ratio"]
    assert isinstance(ratio, float)
    assert int(len(LENGTHS) * ratio) == len(LENGTHS) - len(HELDOUT)
    assert not list((tmp_path / "out" / STATES).iterdir())


@pytest.mark.parametrize("which", ["run_without_final", "run_normed"])
def test_states_without_its_last_slot_are_refused(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="final_state"):
        sent(request.getfixturevalue(which), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_guessed(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    to = RunFolder(tmp_path / "to")
    for said, word in [
        (Said(tiny, None, "pre_norm"), "--taps"),
        (Said(tiny, "after_block:0,after_block:2"), "--final"),
        (Said(tiny, "vllm", "pre_norm"), "none"),
        (Said(tiny, "after_block:0", "pre_norm"), "2 taps"),
    ]:
        with pytest.raises(ConfigError, match=word):
            import_run("speculators", tmp_path / "out", to, said, Silent())
        assert not to.root.exists()


def test_damage_is_named_before_anything_is_written(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    path = tmp_path / "out" / STATES / file_name(4)
    content, tensors = path.read_bytes(), load_file(path)
    said, to = Said(tiny, "vllm:1,3", "pre_norm"), RunFolder(tmp_path / "to")

    def refused(word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            import_run("speculators", tmp_path / "out", to, said, Silent())
        assert not to.root.exists()

    path.write_bytes(content[:-10])
    refused("hs_4")
    save_file({**tensors, "token_ids": tensors["token_ids"] + 1}, path)
    refused("ids of sample 4")
    save_file({**tensors, "hidden_states": tensors["hidden_states"][:, :2].contiguous()}, path)
    refused("alike")
    save_file({**tensors, "hidden_states_scales": torch.ones(1)}, path)
    refused("fp8")
    path.unlink()
    refused("1 absent, hs_4")


def test_states_that_are_not_finite_become_failures(run: RunFolder, tiny: Path, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    path = tmp_path / "out" / STATES / file_name(1)
    tensors = load_file(path)
    tensors["hidden_states"][2, 1, 5] = float("nan")
    save_file(tensors, path)
    to = RunFolder(tmp_path / "to")
    found = import_run("speculators", tmp_path / "out", to, Said(tiny, "vllm:1,3", "pre_norm"), Silent())
    assert (found["num_records"], found["num_failed"]) == (len(LENGTHS) - 1, 1)
    (failure,) = StoreReader(to.states).failures.values()
    assert failure.permanent
    assert "hs_1.safetensors: not finite at token 2, after_block:2" in failure.reason


def test_files_of_states_may_lie_elsewhere(run: RunFolder, tmp_path: Path) -> None:
    sent(run, tmp_path / "out")
    (tmp_path / "out" / STATES).rename(tmp_path / "aside")
    folder = SpeculatorsFolder(tmp_path / "out", Silent(), tmp_path / "aside")
    assert (len(folder), folder.num_slots, folder.hidden_size) == (len(LENGTHS), 2, 32)
    assert PreparedSet.open(run.prepared).num_samples == len(folder)
