"""`headrace doctor`: why a run disappoints.

In: a run's folder, finished or running. Out: findings on stderr for people, as JSON on stdout for programs; exit 0
either way, for a sick run is not an error of the doctor's.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown

_stderr = Console(stderr=True)


def doctor(
    run: Annotated[Path, typer.Argument(help="the run's folder, or its run file", metavar="RUN")],
    served: Annotated[
        Path | None, typer.Option(help="prompts as a server saw them, JSON lines (docs/doctor.md)")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the findings as JSON on stdout")] = False,
) -> None:
    """Say why a run disappoints: fault or lack of data, with evidence and what to do."""
    from headrace.config import load_run_file
    from headrace.doctor.evidence import gather
    from headrace.doctor.examine import examine

    with failures_shown(_stderr):
        root = Path(load_run_file(run).run.run) if run.is_file() else run
        found = examine(gather(root, served))
    if json_:
        sys.stdout.write(json.dumps([one.to_json() for one in found], ensure_ascii=False) + "\n")
        return
    for one in found:
        lines = [f"[{one.kind}] {one.what} ({one.name})", *(f"  {line}" for line in one.evidence)]
        _stderr.print("\n".join([*lines, f"  next: {one.next_step}"]), markup=False, highlight=False, soft_wrap=True)
    if all(one.kind == "note" for one in found):
        _stderr.print("doctor: nothing wrong found", markup=False, highlight=False)
