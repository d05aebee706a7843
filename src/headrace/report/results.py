"""The figures of a finished run, gathered from what its stages wrote.

In: a run's folder. Out: one flat mapping, `results.json`, whose keys a program may rely on (docs/results.md).
"""

import json
from pathlib import Path
from typing import Any

from headrace.config import RunFolder
from headrace.errors import HeadraceError
from headrace.files import stage_seconds

KEYS = (
    "tau",
    "tau_interval",
    "tau_untrained",
    "tau_no_features",
    "tau_prompt_lookup",
    "margin_no_features",
    "margin_prompt_lookup",
    "greedy_identical",
    "num_ties",
    "num_prompts",
    "per_task",
    "per_slot",
    "seconds_plain",
    "seconds_speculative",
)


def gather(folder: RunFolder) -> dict[str, Any]:
    """Collect the figures of a run.

    Returns: the evaluation's figures, `bytes_raw` and `bytes_stored` (bytes), `wall_seconds` (all stages, every start
    of the run together) and `seconds` per stage.
    Raises: HeadraceError when the run was not captured or evaluated yet.
    """
    evaluation = _read(folder.evaluation / "results.json", "an evaluation", "headrace eval")
    captured = _read(folder.states / "stage.json", "captured states", "headrace capture")["summary"]
    seconds = stage_seconds(folder.root)
    results: dict[str, Any] = {key: evaluation.get(key) for key in KEYS}
    results["bytes_raw"] = captured["bytes_raw"]
    results["bytes_stored"] = captured["bytes_stored"]
    results["num_tokens"] = captured["num_tokens"]
    results["wall_seconds"] = round(sum(seconds.values()), 1)
    results["seconds"] = seconds
    return results


def _read(path: Path, what: str, command: str) -> dict[str, Any]:
    if not path.exists():
        raise HeadraceError(what, f"no {path}", f"run `{command}` first")
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
