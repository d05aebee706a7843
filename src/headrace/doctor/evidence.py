"""What a run left behind, gathered for the doctor.

In: a run's folder, finished or running, and what a server saw, if somebody wrote it down. Out: figures by their source;
what is not there (yet) is empty or None. Nothing is loaded that needs torch, and nothing is written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from headrace.config import RunFolder
from headrace.errors import ConfigError
from headrace.files import read_json, read_json_lines, read_stage
from headrace.prepare.prepared import PreparedSet

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """One request as a server saw it: the ids of its prompt, and, where known, the tokens each target pass added."""

    prompt_ids: tuple[int, ...]
    gained: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Evidence:
    """One run.

    `metrics` and `floor_metrics`: lines of metrics.jsonl after step 0; `taus`: (step, tokens trained on, held-out τ) of
    each evaluation; `results` and `prompts`: of `headrace eval`; `captured`: the summary of capture.
    """

    metrics: Sequence[Line] = ()
    floor_metrics: Sequence[Line] = ()
    taus: Sequence[tuple[int, float, float]] = ()
    results: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Line] = ()
    captured: Mapping[str, Any] = field(default_factory=dict)
    prepared: PreparedSet | None = None
    served: Sequence[Served] = ()


def gather(root: Path, served: Path | None = None) -> Evidence:
    """Read a run.

    Raises: ConfigError for a folder that holds no run, and for files that are damaged.
    """
    folder = RunFolder(root)
    if not (folder.prepared.is_dir() or folder.train().is_dir()):
        raise ConfigError("the folder of a run", f"neither prepared/ nor train/ in {root}", "name the run's folder")
    metrics = read_json_lines(folder.train() / "metrics.jsonl")
    results = folder.evaluation / "results.json"
    capture = read_stage(folder.states)
    manifest = folder.prepared / "manifest.json"
    return Evidence(
        metrics=[line for line in metrics if line["step"]],
        floor_metrics=[line for line in read_json_lines(folder.train(False) / "metrics.jsonl") if line["step"]],
        taus=_taus(metrics),
        results=read_json(results, "run `headrace eval` again") if results.exists() else {},
        prompts=read_json_lines(folder.evaluation / "prompts.jsonl"),
        captured=capture["summary"] if capture else {},
        prepared=PreparedSet.open(folder.prepared) if manifest.exists() else None,
        served=read_served(served) if served is not None else (),
    )


def read_served(path: Path) -> list[Served]:
    """Lines of JSON with `prompt_ids`, and `gained` where known. Raises: ConfigError for any other line."""
    found = []
    for number, line in enumerate(read_json_lines(path), 1):
        ids, gained = line.get("prompt_ids"), line.get("gained", [])
        if not _whole(ids) or not _whole(gained):
            raise ConfigError(
                f"prompt_ids and gained as lists of whole numbers in {path}:{number}",
                json.dumps(line)[:80],
                "see docs/doctor.md for what to write down",
            )
        found.append(Served(tuple(ids), tuple(gained)))
    return found


def _whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _taus(metrics: Sequence[Line]) -> list[tuple[int, float, float]]:
    """Evaluations with the tokens trained on before each; an older run did not log them: its steps instead."""
    return [
        (int(line["step"]), float(line.get("tokens", line["step"])), float(line["tau"]))
        for line in metrics
        if line.get("tau") is not None
    ]
