"""Captured runs of a tiny target for tests of other programs' files."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.capture.capture import capture
from headrace.codec.base import record_states
from headrace.codec.registry import open_codec
from headrace.config import RunFile, RunFolder
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.progress import Silent
from headrace.record import sample_id
from headrace.store.reader import StoreReader
from headrace.target.transformers_target import load_target

SRC = Path(headrace.__file__).parent.parent
TAPS = ("after_block:0", "after_block:2")
LENGTHS = (9, 30, 2, 41, 17, 24, 5, 33)
HELDOUT = (2, 5)


def write_set(folder: Path, lengths: Sequence[int] = LENGTHS, heldout: Sequence[int] = HELDOUT) -> None:
    drafts = []
    for row, size in enumerate(lengths):
        ids = np.random.default_rng(row).integers(3, 64, size).astype(np.int32)
        mask = (np.arange(size) >= size // 2).astype(np.uint8)
        drafts.append(Draft(sample_id(ids, mask), ids, mask, "kind", heldout=row in heldout))
    write_prepared(folder, drafts, {"fingerprint": f"set of {len(lengths)}"})


def captured(
    target: Path,
    root: Path,
    *,
    taps: Sequence[str] = TAPS,
    final_state: bool = True,
    dtype: str = "bfloat16",
    codec: str = "raw",
    lengths: Sequence[int] = LENGTHS,
    heldout: Sequence[int] = HELDOUT,
) -> RunFolder:
    """A run with real states of the target."""
    folder = RunFolder(root)
    write_set(folder.prepared, lengths, heldout)
    cfg = RunFile.model_validate(
        {
            "run": str(root),
            "target": {"model": str(target), "dtype": dtype, "taps": list(taps), "device": "cpu"},
            "capture": {"group_tokens": 64, "final_state": final_state, "codec": codec},
            "order": {"window_samples": 4},
        }
    )
    capture(cfg, folder, load_target(cfg.target), Silent())
    return folder


def speculators_python() -> str:
    """The Python of an environment with speculators; the test is skipped where none is named."""
    found = os.environ.get("HEADRACE_SPECULATORS_PYTHON")
    if not found:
        pytest.skip("HEADRACE_SPECULATORS_PYTHON names no python with speculators and hs-connectors")
    return found


def theirs(script: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in speculators' environment, on one thread, without network."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SRC), "COLUMNS": "300"}
    command = [speculators_python(), str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0 or not check, done.stderr[-4000:]
    return done


def states_of(folder: RunFolder) -> dict[bytes, torch.Tensor]:
    """Every stored sample's states [T, L, H], by id."""
    prepared, reader = PreparedSet.open(folder.prepared), StoreReader(folder.states)
    codec = open_codec(reader.manifest.codec, folder.states)
    ids = [prepared.sample_id(row) for row in reader.rows.tolist()]
    return {id: record_states(reader.read(row, id), codec) for row, id in zip(reader.rows.tolist(), ids, strict=True)}


def same_states(a: dict[bytes, torch.Tensor], b: dict[bytes, torch.Tensor]) -> bool:
    """The same samples with the same bits."""
    return a.keys() == b.keys() and all(a[id].dtype == b[id].dtype and torch.equal(a[id], b[id]) for id in a)
