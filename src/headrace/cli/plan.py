"""`headrace plan`: what a run will weigh, take and cost, before anything runs.

In: flags. Out: a table for people, or `--json`. Imports no torch.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown


def plan(
    model: Annotated[str | None, typer.Option(help="demo, a folder, a config.json or a hub id")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="instead of --model")] = None,
    blocks: Annotated[int | None, typer.Option(help="blocks of the target, instead of --model")] = None,
    params: Annotated[float | None, typer.Option(help="billions of parameters, instead of --model")] = None,
    taps: Annotated[str | None, typer.Option(help="names, or z-lab's numbers: 1,16,31,46,61")] = None,
    codec: Annotated[str, typer.Option(help="raw, lossless, fp8, rotated:BITS or latent:RANKxBITS")] = "raw",
    prepared: Annotated[Path | None, typer.Option(help="a prepared set: exact lengths")] = None,
    chats: Annotated[Path | None, typer.Option(help="a JSONL file of chats: sampled")] = None,
    samples: Annotated[int | None, typer.Option(help="number of samples")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="tokens of a sample")] = None,
    mean_prompt: Annotated[float | None, typer.Option(help="prompt tokens of a sample")] = None,
    mean_answer: Annotated[float | None, typer.Option(help="answer tokens of a sample")] = None,
    drafter: Annotated[Path | None, typer.Option(help="config.json of a published drafter")] = None,
    layers: Annotated[int, typer.Option(help="layers of the drafter")] = 5,
    block: Annotated[int, typer.Option(help="tokens of a block")] = 16,
    epochs: Annotated[int, typer.Option(help="visits of every sample")] = 6,
    anchors: Annotated[int, typer.Option(help="blocks of a sample at each visit")] = 512,
    capture_gpu: Annotated[
        str | None, typer.Option(help="GPUs that run the target, for example rtx-pro-6000:2")
    ] = None,
    train_gpu: Annotated[str | None, typer.Option(help="GPUs that train; none means the same, in turns")] = None,
    link: Annotated[str | None, typer.Option(help="between the two, for example '1 Gbit/s'")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="room on a disk, for example '4 TB'")] = None,
    decode_rate: Annotated[float | None, typer.Option(help="answer tokens a second of one stream")] = None,
    max_hours: Annotated[float | None, typer.Option(help="time budget")] = None,
    max_usd: Annotated[float | None, typer.Option(help="money budget")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="figures laid over the packaged ones (YAML)")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="show each figure's formula")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the plan as JSON on stdout")] = False,
) -> None:
    """Say what a run will weigh, how long it will take and what it will cost."""
    from headrace.plan.inputs import make_inputs, split_taps
    from headrace.plan.plan import make_plan
    from headrace.plan.report import render, to_json

    with failures_shown(Console(stderr=True)):
        inputs = make_inputs(
            model=model, hidden_size=hidden_size, num_blocks=blocks, params_billion=params,
            taps=None if taps is None else split_taps(taps), codec=codec, prepared=prepared, chats=chats,
            num_samples=samples, mean_tokens=mean_tokens, mean_prompt=mean_prompt, mean_answer=mean_answer,
            drafter=drafter, num_layers=layers, block_size=block, epochs=epochs, anchors=anchors,
            capture_gpu=capture_gpu, train_gpu=train_gpu, link=link, disk_budget=disk_budget,
            decode_tokens_s=decode_rate, max_hours=max_hours, max_usd=max_usd, catalogue=catalogue,
        )  # fmt: skip
        made = make_plan(inputs)
        if json_:
            sys.stdout.write(json.dumps(to_json(made), ensure_ascii=False) + "\n")
        else:
            Console().print(render(made, explain))
