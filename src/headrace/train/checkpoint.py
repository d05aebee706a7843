"""Checkpoints: folders that are whole or absent.

In: weights, their average if one is kept, optimiser moments and the place in the run. Out: `step-NNNNNNNN/` with
`model.safetensors`, `average.safetensors`, `optimizer.safetensors` and `state.json`; the links `last` and `best` name
the checkpoints that count. A folder is written under another name, synced, renamed, and only then linked, so a crash at
any moment leaves the links on whole checkpoints. There is no state of random numbers in it: order, anchors and rates
are functions of epoch, row and step.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

from headrace.errors import TrainError
from headrace.files import fsync_folder, write_atomic

FORMAT = "headrace-checkpoint-0"
WEIGHTS = "model.safetensors"
MOMENTS = "optimizer.safetensors"
AVERAGE = "average.safetensors"
STATE = "state.json"
LAST = "last"
BEST = "best"
_READ_BYTES = 1 << 24
_HINT = "train first; or take the other of last/ and best/, or train again in another run folder"


@dataclass(frozen=True)
class RunState:
    """Where a run stands after `step` updates, and what made it.

    `epoch`, `place` and `draw` are the next position to train and how often it was used before; `num_steps` is the
    planned length (`planned`: it was measured against a time limit and stays); `holes` maps rows to reasons;
    `elapsed_s` counts all starts of the run.
    """

    step: int
    epoch: int
    place: int
    num_steps: int
    planned: bool = False
    tau: float | None = None
    best_tau: float | None = None
    num_tokens: int = 0
    elapsed_s: float = 0.0
    holes: dict[int, str] = field(default_factory=dict)
    made_from: dict[str, Any] = field(default_factory=dict)
    draw: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON values; rows become strings."""
        return {"format": FORMAT, **asdict(self), "holes": {str(row): why for row, why in self.holes.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RunState":
        """Read what `to_json` gave. Raises: TrainError for another format."""
        if value.get("format") != FORMAT:
            raise TrainError(
                f"a checkpoint of format {FORMAT}", repr(value.get("format")), "use the headrace that wrote it"
            )
        fields = {k: v for k, v in value.items() if k not in ("format", "digests")}
        fields["holes"] = {int(row): why for row, why in fields["holes"].items()}
        return cls(**fields)


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint folder holds; tensors on the CPU. `average`: of the weights, empty where none is kept."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    state: RunState
    average: dict[str, torch.Tensor] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, best: bool) -> Path:
    """Write a checkpoint under `folder`, make it the last one (and the best), and remove those no link names.

    Returns: the checkpoint's own folder.
    """
    target = folder / f"step-{checkpoint.state.step:08d}"
    if not target.exists():
        temporary = folder / f"{target.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors = {WEIGHTS: checkpoint.weights, MOMENTS: checkpoint.moments}
        if checkpoint.average:
            tensors[AVERAGE] = checkpoint.average
        for name, own in tensors.items():
            save_file(own, temporary / name)
        digests = {name: _sync_and_digest(temporary / name) for name in tensors}
        value = {**checkpoint.state.to_json(), "digests": digests}
        write_atomic(temporary / STATE, json.dumps(value, indent=1) + "\n")
        os.rename(temporary, target)
        fsync_folder(folder)
    for link in (LAST, BEST) if best else (LAST,):
        _point(folder / link, target.name)
    fsync_folder(folder)
    remove_strays(folder)
    return target


def load_checkpoint(folder: Path, with_moments: bool = True) -> Checkpoint:
    """Read one checkpoint folder (or a link to it) and check every tensor file against its digest.

    Raises: TrainError when the folder is absent, incomplete or damaged.
    """
    state, digests = _read_state(folder)
    try:
        found = {name: _digest(folder / name) for name in digests if with_moments or name != MOMENTS}
    except OSError as exc:
        raise TrainError(f"a checkpoint in {folder}", f"{type(exc).__name__}: {exc}", _HINT) from exc
    for name, digest in found.items():
        if digest != digests[name]:
            raise TrainError(f"{folder / name} with digest {digests[name]}", digest, _HINT)
    weights, moments, average = (
        load_file(folder / name) if name in found else {} for name in (WEIGHTS, MOMENTS, AVERAGE)
    )
    return Checkpoint(weights, moments, state, average)


def read_state(folder: Path) -> RunState:
    """Where a checkpoint stands, without reading its tensors. Raises: TrainError as `load_checkpoint` does."""
    return _read_state(folder)[0]


def _read_state(folder: Path) -> tuple[RunState, dict[str, str]]:
    """The state, and the digests of the checkpoint's tensor files."""
    try:
        value = json.loads((folder / STATE).read_bytes())
        return RunState.from_json(value), dict(value["digests"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise TrainError(f"a checkpoint in {folder}", f"{type(exc).__name__}: {exc}", _HINT) from exc


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to resume from; None when none was ever finished."""
    link = folder / LAST
    return link.resolve() if link.is_symlink() else None


def mend_links(folder: Path) -> list[str]:
    """Put `last` and `best` right where a copy lost them or made folders of them. Returns: what was done, in words.

    Copies that follow links make two whole folders of one checkpoint; copies that skip links leave none.
    Raises: TrainError when checkpoints are there and none of them is sound.
    """
    notes = []
    for name in (LAST, BEST):
        link = folder / name
        if link.is_dir() and not link.is_symlink():
            target = folder / f"step-{read_state(link).step:08d}"
            if target.exists():
                shutil.rmtree(link)
            else:
                os.rename(link, target)
            _point(link, target.name)
            notes.append(f"{name} was a folder, now a link to {target.name}")
    whole = [path for path in sorted(folder.glob("step-*")) if path.is_dir() and path.suffix != ".tmp"]
    if whole and not (folder / LAST).exists():
        newest = next((path for path in reversed(whole) if _sound(path)), None)
        if newest is None:
            found = ", ".join(path.name for path in whole)
            raise TrainError(f"a sound checkpoint in {folder}", f"only damaged ones: {found}", "remove the folder")
        _point(folder / LAST, newest.name)
        notes.append(f"last was lost, now a link to {newest.name}, the newest that is sound")
    if (folder / BEST).is_symlink() and not (folder / BEST).exists():
        _point(folder / BEST, (folder / LAST).readlink().name)
        notes.append("best was lost, now the same as last")
    return notes


def _sound(folder: Path) -> bool:
    try:
        load_checkpoint(folder)
    except TrainError:
        return False
    return True


def remove_strays(folder: Path) -> None:
    """Remove half-saved checkpoints, and finished ones that neither link names; nothing where no link is."""
    kept = {(folder / link).readlink().name for link in (LAST, BEST) if (folder / link).is_symlink()}
    for stray in folder.glob("step-*"):
        if stray.name not in kept and (kept or stray.suffix == ".tmp"):
            shutil.rmtree(stray)


def _point(link: Path, name: str) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, link)


def _sync_and_digest(path: Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _digest(path)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    return str(hasher.hexdigest())
