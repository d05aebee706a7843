"""The commands: parse, call a room, print.

In: a run file and flags. Out: people read stderr, programs read stdout (`--json`). Only here and in a worker's
outermost loop are errors caught broadly; each branch of the family has its exit code.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace import __version__
from headrace.cli import codec as codec_commands
from headrace.cli import interchange, stages
from headrace.cli import speculators as speculators_commands
from headrace.cli import store as store_commands
from headrace.cli.doctor import doctor
from headrace.cli.engine import engine
from headrace.cli.failure import failures_shown
from headrace.cli.plan import plan
from headrace.cli.probe import probe
from headrace.cli.progress import Terminal
from headrace.cli.serve import serve
from headrace.config import load_run_file
from headrace.errors import ConfigError

# Spinning threads make a shared machine several times slower (docs/log.md, 2026-11-30). Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    help="Carries a target model's hidden states to the trainer of its speculative-decoding drafter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_stderr = Console(stderr=True)
app.command()(plan)
app.command()(doctor)
app.command()(engine)
app.command()(serve)
app.command()(probe)
app.add_typer(store_commands.app, name="store")
store_commands.app.command(name="export")(interchange.export)
store_commands.app.command(name="import")(interchange.import_)
app.add_typer(codec_commands.app, name="codec")
app.add_typer(speculators_commands.app, name="speculators")

File = Annotated[
    Path | None, typer.Argument(help="run file (YAML); none means the demo's defaults", metavar="[RUN.yaml]")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the file; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="print the summary as JSON on stdout")]


def _do(
    work: Callable[[stages.Run], dict[str, Any]], file: Path | None, flags: list[str] | None, as_json: bool
) -> None:
    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        _check_alone(work)
        try:
            summary = work(stages.Run(load_run_file(file, flags or ()), progress))
        finally:
            progress.end()
    if as_json and os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(summary, ensure_ascii=False) + "\n")


def _check_alone(work: Callable[[stages.Run], dict[str, Any]]) -> None:
    """Refuse `torchrun` for what one process does: every one of them would do all of it, into the same folder."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and work is not stages.train:
        raise ConfigError("one process", f"WORLD_SIZE {size}", "only `headrace train` is for torchrun")


@app.command()
def prepare(file: File = None, set_: Set = None, json_: Json = False) -> None:
    """Turn chats into token ids and loss masks."""
    _do(stages.prepare, file, set_, json_)


@app.command()
def regenerate(file: File = None, set_: Set = None, json_: Json = False) -> None:
    """Let the target answer the prompts itself."""
    _do(stages.regenerate, file, set_, json_)


@app.command()
def capture(
    file: File = None,
    set_: Set = None,
    json_: Json = False,
    raw_slice: Annotated[
        int | None, typer.Option(min=1, help="so many tokens only, raw, into slice/: what a codec is fitted on")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="by targets on a Ray cluster (docs/capture.md)")] = False,
) -> None:
    """Capture the target's hidden states into the store."""
    if ray and raw_slice is not None:
        raise typer.BadParameter("--raw-slice is for one target: leave --ray out")
    whole = stages.capture_on_ray if ray else stages.capture
    work = whole if raw_slice is None else lambda one: stages.capture_slice(one, raw_slice)
    _do(work, file, set_, json_)


@app.command()
def train(file: File = None, set_: Set = None, json_: Json = False) -> None:
    """Train the drafter (and the no-features floor)."""
    _do(stages.train, file, set_, json_)


@app.command(name="eval")
def eval_(
    file: File = None,
    set_: Set = None,
    json_: Json = False,
    drafter: Annotated[Path | None, typer.Option(help="an exported folder, instead of the run's checkpoint")] = None,
    engine: Annotated[
        str, typer.Option(help="vllm: serve the exported drafter in real vLLM and compare (docs/engines.md)")
    ] = "transformers",
) -> None:
    """Measure τ, its floors and greedy identity on held-out prompts."""
    _do(lambda run: stages.evaluate(run, drafter, engine), file, set_, json_)


@app.command()
def export(
    file: File = None,
    set_: Set = None,
    json_: Json = False,
    speculators: Annotated[bool, typer.Option("--speculators", help="also in speculators' layout")] = False,
    push: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub to upload drafter/ to")] = None,
) -> None:
    """Write the drafter as a stock checkpoint with its model card, and print the commands that serve it."""
    _do(lambda run: stages.export(run, speculators, push), file, set_, json_)


@app.command()
def report(file: File = None, set_: Set = None, json_: Json = False) -> None:
    """Write report.html and results.json."""
    _do(stages.report, file, set_, json_)


@app.command()
def run(file: File = None, set_: Set = None, json_: Json = False) -> None:
    """Run every stage in order; what is done is skipped."""
    _do(stages.run_all, file, set_, json_)


@app.command()
def show(
    file: File = None,
    set_: Set = None,
    row: Annotated[int, typer.Option(help="row of the prepared set")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="shares by role and source instead")] = False,
    json_: Json = False,
) -> None:
    """Print one sample with its loss mask in colour, or the set's shares."""
    _do(lambda one: _shown(one, None if stats else row, json_), file, set_, json_)


def _shown(one: stages.Run, row: int | None, as_json: bool) -> dict[str, Any]:
    from headrace.prepare.show import described_row, show_row
    from headrace.prepare.stats import shares, table

    folder, model = one.folder.prepared, one.model_folder()
    if row is not None:
        if not as_json:
            Console().print(show_row(folder, model, row), soft_wrap=True)
        return described_row(folder, model, row)
    found = shares(folder, model)
    if not as_json:
        Console().print(*table(found))
    return found


@app.command()
def settings() -> None:
    """Print every setting of the run file with its default and meaning (Markdown)."""
    from headrace.config import settings_table

    sys.stdout.write(settings_table())


def _version(value: bool) -> None:
    if value:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log what happens inside")] = False,
) -> None:
    """Set up logging for every command."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr)
