"""`headrace plan`: what a run will weigh, take and cost, before anything runs.

In: flags, a run file, or a finished run. Out: a table for people, or `--json`. Imports no torch unless it measures.
"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.errors import PlanError

if TYPE_CHECKING:
    from headrace.config import RunFile, RunFolder
    from headrace.plan.inputs import Measurement


RUN = typer.Argument(help="run file: plan its run, save the plan in its folder", metavar="[RUN.yaml]")
MEASURE = typer.Option("--measure", help="time a short capture and a few training steps here, plan from them")
CHECK = typer.Option(help="a run's folder: put its saved plan and what it took side by side")
CODEC = typer.Option(help="raw, lossless, fp8, rotated:BITS, latent:RANKxBITS, auto, or the folder of a fitted codec")
CAPTURE_GPU = typer.Option(help="GPUs that run the target, for example rtx-pro-6000:2")


def plan(
    context: typer.Context,
    file: Annotated[Path | None, RUN] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the run file")] = None,
    measure: Annotated[bool, MEASURE] = False,
    check: Annotated[Path | None, CHECK] = None,
    save: Annotated[Path | None, typer.Option(help="save the plan to this file")] = None,
    model: Annotated[str | None, typer.Option(help="demo, a folder, a config.json or a hub id")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="instead of --model")] = None,
    num_blocks: Annotated[int | None, typer.Option("--blocks", help="blocks of the target, instead of --model")] = None,
    params_billion: Annotated[
        float | None, typer.Option("--params", help="billions of parameters, instead of --model")
    ] = None,
    taps: Annotated[str | None, typer.Option(help="names, or z-lab's numbers: 1,16,31,46,61")] = None,
    codec: Annotated[str | None, CODEC] = None,
    prepared: Annotated[Path | None, typer.Option(help="a prepared set: exact lengths")] = None,
    chats: Annotated[Path | None, typer.Option(help="a JSONL file of chats: sampled")] = None,
    num_samples: Annotated[int | None, typer.Option("--samples", help="number of samples")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="tokens of a sample")] = None,
    mean_prompt: Annotated[float | None, typer.Option(help="prompt tokens of a sample")] = None,
    mean_answer: Annotated[float | None, typer.Option(help="answer tokens of a sample")] = None,
    drafter: Annotated[Path | None, typer.Option(help="config.json of a published drafter")] = None,
    num_layers: Annotated[int | None, typer.Option("--layers", help="layers of the drafter")] = None,
    block_size: Annotated[int | None, typer.Option("--block", help="tokens of a block")] = None,
    epochs: Annotated[int | None, typer.Option(help="visits of every sample")] = None,
    anchors: Annotated[int | None, typer.Option(help="blocks of a sample at each visit")] = None,
    capture_gpu: Annotated[str | None, CAPTURE_GPU] = None,
    train_gpu: Annotated[str | None, typer.Option(help="GPUs that train; none means the same, in turns")] = None,
    link: Annotated[str | None, typer.Option(help="between the two, for example '1 Gbit/s'")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="room on a disk, for example '4 TB'")] = None,
    decode_tokens_s: Annotated[
        float | None, typer.Option("--decode-rate", help="answer tokens a second of one stream")
    ] = None,
    num_streams: Annotated[
        int | None, typer.Option("--streams", help="streams that answer side by side at that rate")
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="time budget")] = None,
    max_usd: Annotated[float | None, typer.Option(help="money budget")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="figures laid over the packaged ones (YAML)")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="show each figure's formula")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the plan as JSON on stdout")] = False,
) -> None:
    """Say what a run will weigh, how long it will take and what it will cost."""
    with failures_shown(Console(stderr=True)):
        if check is not None:
            _check(check, json_)
        else:
            _plan(_load_run(file, set_), _said(context), measure, save, explain, json_)


def _said(context: typer.Context) -> dict[str, Any]:
    """The inputs of a plan among the flags, by their names in `PlanInputs`; taps split."""
    from headrace.plan.inputs import PlanInputs, split_taps

    given = {k: v for k, v in context.params.items() if k in PlanInputs.model_fields and v is not None}
    return {**given, "taps": split_taps(given["taps"])} if "taps" in given else given


def _check(folder: Path, as_json: bool) -> None:
    from headrace.config import RunFolder
    from headrace.plan.measure import check_saved
    from headrace.plan.run_file import load_saved_plan, real_figures

    rows = check_saved(load_saved_plan(folder), real_figures(RunFolder(folder)))
    if as_json:
        sys.stdout.write(json.dumps([row.to_json() for row in rows], allow_nan=False) + "\n")
    else:
        for row in rows:
            sys.stdout.write(row.text() + "\n")


def _load_run(file: Path | None, flags: list[str] | None) -> "RunFile | None":
    """The run file of a plan, if one is named. Raises: ConfigError."""
    from headrace.config import load_run_file

    if file is None and flags:
        raise PlanError("a run file for --set", "none", "headrace plan RUN.yaml --set section.key=value")
    return None if file is None else load_run_file(file, flags or ()).run


def _plan(
    cfg: "RunFile | None", values: dict[str, Any], measure: bool, save: Path | None, explain: bool, as_json: bool
) -> None:
    from headrace.config import RunFolder
    from headrace.plan.inputs import make_inputs
    from headrace.plan.plan import make_plan
    from headrace.plan.report import render, save_plan, to_json
    from headrace.plan.run_file import PLAN, run_inputs

    if cfg is None:
        if measure:
            raise PlanError("a run file to measure", "none", "headrace plan RUN.yaml --measure")
    else:
        folder = RunFolder(Path(cfg.run))
        counted = {"prepared", "chats", "num_samples"} & set(values)
        values = {**run_inputs(cfg, folder, not counted), **values}
        if measure:
            values["measured"] = _measure(cfg, folder)
        if folder.root.is_dir():
            save = save or folder.root / PLAN
    made = make_plan(make_inputs(**values))
    if cfg is not None and (limit := cfg.train.max_seconds or cfg.train.max_steps):
        kind = "s" if cfg.train.max_seconds else "steps"
        Console(stderr=True).print(
            f"note: all {cfg.train.epochs} epochs are planned; the run ends after {limit:g} {kind}"
        )
    if as_json:
        sys.stdout.write(json.dumps(to_json(made), ensure_ascii=False) + "\n")
    else:
        Console().print(render(made, explain))
    if save is not None:
        save_plan(made, save)


def _measure(cfg: "RunFile", folder: "RunFolder") -> "Measurement":
    """The only plan that needs torch."""
    from headrace.cli.progress import Terminal
    from headrace.target.transformers_target import load_target
    from headrace.trial import measure

    progress = Terminal(Console(stderr=True))
    began = time.monotonic()
    target = load_target(cfg.target)
    try:
        return measure(cfg, folder, target, time.monotonic() - began, progress)
    finally:
        progress.end()
