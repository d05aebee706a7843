"""speculators' own trainer on a headrace store, with the real packages; skipped where no python with them is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RunFolder
from headrace.interchange.arrow_folder import write_arrow_folder
from headrace.interchange.outgoing import Outgoing
from headrace.interchange.peers import export_run
from headrace.progress import Silent
from headrace.testing.states import fake_sample
from headrace.testing.tiny_target import save_tiny_target
from tests.interchange.runs import captured, speculators_python, theirs

pytestmark = pytest.mark.timeout(1200)  # each start of their program takes ten seconds, on a busy machine minutes

TRAINER = Path(__file__).parent / "cpu_trainer.py"
LENGTHS = [24 + i * 13 % 40 for i in range(24)]
HELDOUT = (3, 9, 15)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    speculators_python()
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return captured(tiny, tmp_path_factory.mktemp("run"), lengths=LENGTHS, heldout=HELDOUT)


def flags(tiny: Path, data: Path, out: Path, ratio: float) -> list[str]:
    """Of their trainer: one layer, one epoch, no compiled or CUDA kernels."""
    return (
        f"--verifier-name-or-path {tiny} --data-path {data} --save-path {out} --train-data-ratio {ratio} "
        "--speculator-type dflash --total-seq-len 128 --epochs 1 --num-layers 1 --block-size 4 --max-anchors 8 "
        "--mask-token-id 63 --draft-attn-impl sdpa --loss-implementation eager --full-attention-indices 0 --log-freq 1 "
        "--no-resume-from-checkpoint"
    ).split()


def figures(path: Path) -> list[dict[str, Any]]:
    """What was trained and validated, times left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: line[key] for key in ("train", "val", "epoch", "global_step") if key in line} for line in lines]


def both_epochs(tiny: Path, run: RunFolder, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Figures of an epoch from its own files and of one from our store, and whether the weights are the same bytes."""
    told = export_run("speculators", run, folder / "data", Silent())
    files, store, ratio = folder / "files", folder / "store", told["train_data_ratio"]
    common = ["--num-workers", "0", "--on-missing", "raise", "--target-layer-ids", "1", "3"]
    own = flags(tiny, folder / "data", files, ratio)
    theirs(TRAINER, str(folder / "files.jsonl"), "speculators", "train", *own, *common)
    shutil.rmtree(folder / "data" / "hidden_states")  # nothing but the store can have them now
    ours = flags(tiny, folder / "data", store, ratio)
    command = ["headrace", "speculators", "train", "--states", str(run.states), *ours, "--num-workers", "0"]
    theirs(TRAINER, str(folder / "store.jsonl"), *command)
    weights = [(out / "0" / "model.safetensors").read_bytes() for out in (files, store)]
    return figures(folder / "files.jsonl"), figures(folder / "store.jsonl"), weights[0] == weights[1]


def test_an_epoch_from_the_store_has_the_losses_and_weights_of_its_own_files(
    tiny: Path, run: RunFolder, tmp_path: Path
) -> None:
    a, b, same_weights = both_epochs(tiny, run, tmp_path)
    losses = [line["train"]["loss"] for line in a if "train" in line]
    assert len(losses) >= 8
    assert len(set(losses)) == len(losses)
    assert [line["val"]["loss_epoch"] for line in a if "val" in line]
    assert a == b
    assert same_weights


def test_the_backend_gives_what_their_file_backend_gives(run: RunFolder, tmp_path: Path) -> None:
    export_run("speculators", run, tmp_path / "data", Silent())
    outgoing = Outgoing(run)
    samples = [outgoing.prepared.sample(row) for row in outgoing.rows]
    write_arrow_folder(tmp_path / "data", [*samples, fake_sample(99)])
    shutil.copytree(run.states, tmp_path / "states")
    done = theirs(Path(__file__).parent / "transfer_side.py", str(tmp_path / "states"), str(tmp_path / "data"))
    assert f"{len(LENGTHS)} samples alike" in done.stdout


def test_a_store_without_the_last_state_is_refused(tiny: Path, tmp_path: Path) -> None:
    run = captured(tiny, tmp_path / "run", final_state=False, lengths=(9, 12), heldout=())
    command = ["headrace", "speculators", "train", "--states", str(run.states)]
    done = theirs(TRAINER, str(tmp_path / "m"), *command, *flags(tiny, tmp_path, tmp_path / "out", 0.5), check=False)
    assert done.returncode == 2
    assert "final:pre_norm" in done.stderr
    assert "capture.final_state: true" in done.stderr
    assert not (tmp_path / "out").exists()


def test_their_default_to_generate_is_refused_when_asked_for(tiny: Path, run: RunFolder, tmp_path: Path) -> None:
    told = export_run("speculators", run, tmp_path / "data", Silent(), states=False)
    own = [*flags(tiny, tmp_path / "data", tmp_path / "out", told["train_data_ratio"]), "--on-missing", "generate"]
    command = ["headrace", "speculators", "train", "--states", str(run.states), *own]
    done = theirs(TRAINER, str(tmp_path / "m"), *command, check=False)
    assert done.returncode == 2
    assert "--on-missing raise" in done.stderr
    other = captured(tiny, tmp_path / "other", lengths=[30, *LENGTHS[1:]], heldout=HELDOUT)
    mixed = [*command[:4], str(other.states), *own[:-2], "--num-workers", "0"]
    done = theirs(TRAINER, str(tmp_path / "m"), *mixed, check=False)
    assert done.returncode == 8
    assert "the prepared set these states were captured from" in done.stderr
