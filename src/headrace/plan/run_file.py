"""A plan of a run file, and what its run took.

In: a run file and the run's folder. Out: the inputs of a plan; after the run, its bytes and seconds as its stages
recorded them. Reads JSON and the prepared set's lengths, imports no torch.
"""

import json
from pathlib import Path
from typing import Any

from headrace.config import RunFile, RunFolder
from headrace.errors import PlanError
from headrace.files import stage_seconds

PLAN = "plan.json"


def run_inputs(cfg: RunFile, folder: RunFolder, with_samples: bool = True) -> dict[str, Any]:
    """The inputs that a run file fixes; the samples are those of its prepared set, or of its chats before there is one.

    Args: with_samples: False where they are given otherwise.
    Raises: PlanError when nothing says how many samples there are.
    """
    drafter = cfg.drafter
    return {
        "model": cfg.target.model,
        "taps": cfg.target.taps,
        "num_taps": cfg.target.num_taps,
        "final_state": cfg.capture.final_state,
        "dtype": cfg.states_dtype,
        "codec": cfg.capture.codec,
        "num_layers": drafter.num_layers,
        "block_size": drafter.block_size,
        "intermediate_size": drafter.intermediate_size,
        "num_heads": drafter.num_heads,
        "num_kv_heads": drafter.num_kv_heads,
        "epochs": cfg.train.epochs,
        "anchors": cfg.train.anchors,
        "read_ahead": cfg.train.read_ahead,
        **(_samples(cfg, folder) if with_samples else {}),
    }


def _samples(cfg: RunFile, folder: RunFolder) -> dict[str, Any]:
    if (folder.prepared / "manifest.json").is_file():
        return {"prepared": folder.prepared}
    if len(cfg.prepare.data) == 1:
        return {"chats": Path(cfg.prepare.data[0]), "heldout_share": cfg.prepare.heldout_fraction}
    raise PlanError(
        "a prepared set, or one file of chats to estimate from",
        f"no {folder.prepared} and {len(cfg.prepare.data)} files in prepare.data",
        "run `headrace prepare` and `headrace regenerate` first, or give --samples and --mean-tokens",
    )


def load_saved_plan(folder: Path) -> dict[str, Any]:
    """The plan saved in a run's folder. Raises: PlanError when there is none."""
    path = folder / PLAN
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise PlanError(f"a saved plan at {path}", str(exc), "make one with `headrace plan RUN.yaml`") from exc
    return saved


def real_figures(folder: RunFolder) -> dict[str, float]:
    """What the finished stages of a run took: bytes, and seconds over every start. Raises: PlanError for none."""
    real: dict[str, float] = {}
    seconds = stage_seconds(folder.root)
    captured, trained = _summary(folder.states), _summary(folder.train())
    if _summary(folder.answers) and "regenerate" in seconds:
        real["decode_s"] = seconds["regenerate"]
    if captured:
        real["total_bytes"], real["stored_bytes"] = captured["bytes_raw"], captured["bytes_stored"]
        real["capture_s"] = seconds["capture"]
    if trained:
        real["train_s"] = seconds["train"]
        real["train_tokens"] = trained["num_tokens"]
    if not real:
        raise PlanError("a run that has captured or trained", f"nothing finished in {folder.root}", "run it first")
    return real


def _summary(stage: Path) -> dict[str, Any]:
    """The summary of a finished stage, else nothing."""
    path = stage / "stage.json"
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return dict(stored["summary"]) if stored["finished"] else {}
