"""`headrace probe`: are the states right that this run captures?

In: a run file. Out: a line for each finding on stderr, all of them as JSON on stdout (`--json`), failed or not; an
error with cause and fix where one failed.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal
from headrace.cli.stages import Run
from headrace.config import load_run_file

_stderr = Console(stderr=True)


def probe(
    file: Annotated[
        Path | None, typer.Argument(help="run file (YAML); none means the demo's defaults", metavar="[RUN.yaml]")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the file")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the findings as JSON on stdout")] = False,
) -> None:
    """Prove that states are right: those of engines, or of the target in transformers."""
    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        from headrace.capture.probe import PROBE_FILE, raise_failed
        from headrace.capture.probe_run import probe_run

        run = Run(load_run_file(file, set_ or ()), progress)
        try:
            findings = probe_run(run.cfg, run.folder, run.capturing(), run.target, progress)
        finally:
            progress.end()
        if json_:
            sys.stdout.write(json.dumps([one.to_json() for one in findings], ensure_ascii=False) + "\n")
        raise_failed(findings, run.folder.root / PROBE_FILE)
