"""`headrace store export` and `import`: other programs' files of hidden states, both ways.

In: a run folder, or a peer's folder and what its user says of it. Out: the other; a summary on stdout.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal

_stderr = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print as JSON on one line")]
To = Annotated[str, typer.Option("--to", help="speculators, specforge or deepspec")]
From = Annotated[str, typer.Option("--from", help="speculators, specforge or deepspec")]
Taps = Annotated[
    str | None,
    typer.Option(help="tap of each slot: after_block:1,after_block:8; or vllm:2,9; or zlab where the files list them"),
]
Final = Annotated[str | None, typer.Option(help="the last state in the files: pre_norm, post_norm or drop")]


def export(
    run: Annotated[Path, typer.Argument(help="folder of a run", metavar="RUN")],
    out: Annotated[Path, typer.Argument(help="folder to write", metavar="OUT")],
    to: To,
    target: Annotated[Path | None, typer.Option(help="the target's folder, to apply its final norm")] = None,
    with_final: Annotated[bool, typer.Option("--with-final", help="specforge: the last state too")] = False,
    without_states: Annotated[bool, typer.Option("--without-states", help="speculators: the data set alone")] = False,
    json_: Json = False,
) -> None:
    """Write a run's states as another program's files."""
    from headrace.config import RunFolder
    from headrace.interchange.peers import export_run

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        try:
            chosen: dict[str, Any] = {"target": target, "final": with_final, "states": not without_states}
            found = export_run(to, RunFolder(run), out, progress, **chosen)
        finally:
            progress.end()
    _print(found, json_)


def import_(
    folder: Annotated[Path, typer.Argument(help="the other program's folder", metavar="FOLDER")],
    run: Annotated[Path, typer.Argument(help="folder of the run to make", metavar="RUN")],
    from_: From,
    target: Annotated[Path, typer.Option(help="folder of the target whose states they are")],
    taps: Taps = None,
    final: Final = None,
    hidden_states: Annotated[Path | None, typer.Option(help="speculators: where hs_*.safetensors lie")] = None,
    heldout: Annotated[float | None, typer.Option(help="share held out, by prompt")] = None,
    json_: Json = False,
) -> None:
    """Make a run's prepared set and states from another program's files."""
    from headrace.config import RunFolder
    from headrace.interchange.incoming import Said
    from headrace.interchange.peers import import_run

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        try:
            said = Said(target, taps, final) if heldout is None else Said(target, taps, final, heldout)
            found = import_run(from_, folder, RunFolder(run), said, progress, hidden_states)
        finally:
            progress.end()
    _print(found, json_)


def _print(found: dict[str, Any], as_json: bool) -> None:
    sys.stdout.write(json.dumps(found, indent=None if as_json else 1, ensure_ascii=False) + "\n")
