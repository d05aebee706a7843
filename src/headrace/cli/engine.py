"""`headrace engine`: the `vllm serve` of a run, printed; with `--launch` started and watched.

In: a run file. Out: the command on stdout, `--json` with where `engine.json` lies; a server until it is stopped.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal

_stderr = Console(stderr=True)


def engine(
    file: Annotated[Path, typer.Argument(help="run file (YAML)", metavar="RUN.yaml")],
    launch: Annotated[bool, typer.Option("--launch", help="start the server and watch it")] = False,
    name: Annotated[str, typer.Option(help="folder under engines/ of the run, one for each server")] = "0",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="instead of engine.port")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    file_form: Annotated[bool, typer.Option("--file", help="states as one file a request, no channel")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the file")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print as JSON on stdout")] = False,
) -> None:
    """Print the vLLM server that captures for a run; with --launch, start and watch it."""
    from headrace.capture.engine_launch import Wish, prepared_engine
    from headrace.capture.engine_launch import launch as start
    from headrace.config import RunFolder, load_run_file

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        cfg = load_run_file(file, set_ or ()).run
        with prepared_engine(cfg, RunFolder(Path(cfg.run)), Wish(name, host, port, file_form), progress) as one:
            told = {"engine": str(one.path), "url": one.file.url, "command": one.shown}
            sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n" if json_ else one.shown + "\n")
            sys.stdout.flush()
            if launch:
                signal.signal(signal.SIGTERM, _interrupt)  # the server ends with us
                try:
                    start(one, progress)
                finally:
                    progress.end()


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
