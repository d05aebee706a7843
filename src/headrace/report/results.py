"""The figures of a finished run, gathered from what its stages wrote.

In: a run's folder. Out: one flat mapping, `results.json`, whose keys a program may rely on (docs/results.md).
"""

from pathlib import Path
from typing import Any

from headrace.config import RunFolder
from headrace.errors import HeadraceError
from headrace.files import read_stage, stage_seconds
from headrace.record import digest

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


def gather(folder: RunFolder, streamed: bool = False) -> dict[str, Any]:
    """Collect the figures of a run.

    Args: streamed: its states lie elsewhere; `bytes_raw`, `bytes_stored` and `num_tokens` are None then.
    Returns: the evaluation's figures, `bytes_raw` and `bytes_stored` (bytes), `wall_seconds` (all stages, every start
    of the run together), `seconds` per stage, and of a reduced `draft_vocabulary` its size and coverage, else None.
    Raises: HeadraceError when the run was not captured or evaluated yet.
    """
    evaluation = _finished(folder.evaluation, "an evaluation", "headrace eval")
    captured = {} if streamed else _finished(folder.states, "captured states", "headrace capture")
    _check_drafter(folder, evaluation)
    seconds = stage_seconds(folder.root)
    results: dict[str, Any] = {key: evaluation.get(key) for key in KEYS}
    results.update({key: captured.get(key) for key in ("bytes_raw", "bytes_stored", "num_tokens")})
    results["wall_seconds"] = round(sum(seconds.values()), 1)
    results["seconds"] = seconds
    trained = read_stage(folder.train()) or {}
    results["draft_vocabulary"] = (trained.get("summary") or {}).get("draft_vocabulary")
    return results


def _finished(folder: Path, what: str, command: str) -> dict[str, Any]:
    """The summary of a finished stage. Raises: HeadraceError saying which command to run."""
    stage, hint = read_stage(folder), f"run `{command}` first"
    if stage is None:
        raise HeadraceError(what, f"no {folder / 'stage.json'}", hint)
    if not stage["finished"]:
        raise HeadraceError(what, f"{folder} says that it has not ended", hint)
    return dict(stage["summary"])


def _check_drafter(folder: RunFolder, evaluation: dict[str, Any]) -> None:
    """Refuse figures of another checkpoint than the run's last one."""
    weights = folder.train() / "last" / "model.safetensors"
    if weights.exists() and digest(weights.read_bytes()).hex() != evaluation.get("drafter"):
        raise HeadraceError(
            "an evaluation of the run's last checkpoint", "one of another checkpoint", "run `headrace eval` again"
        )
