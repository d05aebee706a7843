"""A plan of a run file, and what its run took.

In: a run file and the run's folder. Out: the inputs of a plan; after the run, its bytes and seconds as its stages
recorded them. Reads JSON and the prepared set's lengths, imports no torch.
"""

from pathlib import Path
from typing import Any

from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError, PlanError
from headrace.files import read_json, read_stage, stage_seconds
from headrace.kinds import DEMO_DATA, DataSource
from headrace.plan.measure import finite

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
        "store_bytes": cfg.store.max_bytes,
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
    paths = [DataSource.of(given).path for given in cfg.prepare.data]
    if len(paths) == 1 and paths[0] != DEMO_DATA:
        return {"chats": Path(paths[0]), "heldout_share": cfg.prepare.heldout_fraction}
    given = "the built-in prompts" if paths == [DEMO_DATA] else f"{len(paths)} files"
    raise PlanError(
        "a prepared set, or one file of chats to estimate from",
        f"no {folder.prepared}, and {given} in prepare.data",
        "run `headrace prepare` and `headrace regenerate` first, or give --samples and --mean-tokens",
    )


def load_saved_plan(folder: Path) -> dict[str, Any]:
    """The plan saved in a run's folder. Raises: PlanError when there is none, or it lacks what a plan has."""
    path, hint = folder / PLAN, "make one with `headrace plan RUN.yaml`"
    try:
        saved = read_json(path, hint)
    except ConfigError as exc:
        raise PlanError(f"a saved plan at {path}", exc.args[1], hint) from exc
    kinds = {"plan": dict, "made_for": str, "cost_against_disk": list}
    wrong = [key for key, kind in kinds.items() if not isinstance(saved.get(key), kind)]
    if wrong:
        raise PlanError(f"a saved plan at {path}", f"{', '.join(wrong)} missing or of another kind", hint)
    return saved


def real_figures(folder: RunFolder) -> dict[str, float]:
    """What the finished stages of a run took: bytes, and seconds over every start, where `stages.jsonl` has them.

    Raises: PlanError for no finished stage, and naming a file that is damaged.
    """
    real: dict[str, float] = {}
    try:
        seconds = stage_seconds(folder.root)
    except ConfigError as exc:
        raise PlanError(*exc.args) from exc
    if _finished(folder.answers):
        real |= _seconds(seconds, "regenerate", "decode_s")
    if captured := _finished(folder.states, "bytes_raw", "bytes_stored"):
        real |= {"total_bytes": captured["bytes_raw"], "stored_bytes": captured["bytes_stored"]}
        real |= _seconds(seconds, "capture", "capture_s")
    if trained := _finished(folder.train(), "num_tokens"):
        real |= _seconds(seconds, "train", "train_s")
        real["train_tokens"] = trained["num_tokens"]
    if not real:
        raise PlanError("a run that has captured or trained", f"nothing finished in {folder.root}", "run it first")
    return real


def _seconds(seconds: dict[str, float], stage: str, name: str) -> dict[str, float]:
    return {name: seconds[stage]} if stage in seconds else {}


def _finished(stage: Path, *figures: str) -> dict[str, Any]:
    """The summary of a finished stage, with these figures in it; else nothing."""
    try:
        stored = read_stage(stage)
    except ConfigError as exc:
        raise PlanError(*exc.args) from exc
    if stored is None or not stored["finished"]:
        return {}
    summary, hint = stored["summary"], "restore it, or remove its folder and run the stage again"
    where = stage / "stage.json"
    return {**summary, **{name: finite(summary.get(name), f"{name} in {where}", hint) for name in figures}}
