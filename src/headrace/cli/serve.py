"""`headrace serve`: the states of a run over the network, captured on demand.

In: a run file, its prepared set, its target; or, with `--stored`, its store alone. Out: a server until it is stopped, a
line every ten seconds on stderr, the same in `serve/sight.jsonl`; `--json` prints where it listens.
"""

import json
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal

if TYPE_CHECKING:
    from headrace.cli.stages import Run
    from headrace.stream.supply import Supply

_stderr = Console(stderr=True)
_NONE: list[str] = []


def serve(
    file: Annotated[Path | None, typer.Argument(help="run file (YAML)", metavar="[RUN.yaml]")] = None,
    make_cert: Annotated[bool, typer.Option("--make-cert", help="write key, certificate and token, and end")] = False,
    name: Annotated[list[str], typer.Option(help="with --make-cert: a host name or address of this machine")] = _NONE,
    stored: Annotated[bool, typer.Option("--stored", help="serve what is stored; load no target")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the file")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print as JSON on stdout")] = False,
) -> None:
    """Serve a run's states to a trainer on another machine."""
    from headrace.cli.stages import Run
    from headrace.config import load_run_file
    from headrace.stream.secrets import make_files

    with failures_shown(_stderr):
        run = Run(load_run_file(file, set_ or ()), Terminal(_stderr))
        if not make_cert:
            _serve(run, stored, json_)
            return
        written = [str(path) for path in make_files(run.folder.root / "serve", name)]
        sys.stdout.write(json.dumps({"written": written}) + "\n" if json_ else "".join(f"{p}\n" for p in written))


def _serve(run: "Run", stored: bool, as_json: bool) -> None:
    from headrace.store.verify import BASIS_NAME
    from headrace.stream.server import Secrets, Server
    from headrace.stream.sight import EVERY_S, Metrics, Sight, server_look

    cfg, folder = run.cfg.serve, run.folder.root / "serve"
    secrets = Secrets.read(cfg, folder)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        supply = _supply(run, stored)
        stack.callback(supply.close)
        server = Server(supply, cfg, secrets, run.folder.states / BASIS_NAME)
        stack.callback(server.close)
        where = {"address": str(server.address)}
        if cfg.metrics_port is not None:
            metrics = Metrics(server.figures, cfg.metrics_port)
            stack.callback(metrics.close)
            where["metrics"] = f"http://127.0.0.1:{metrics.port}/metrics"
        run.progress.note(f"serve: listens at {where['address']}")
        if as_json:
            sys.stdout.write(json.dumps(where) + "\n")
            sys.stdout.flush()
        sight = Sight(server.figures, server_look, folder / "sight.jsonl")
        while not stop.wait(EVERY_S):
            run.progress.note(f"serve: {sight.look().line}")
            if supply.failed is not None:  # readers were told meanwhile
                raise supply.failed
        run.progress.note("serve: stopped")


def _supply(run: "Run", stored: bool) -> "Supply":
    if stored:
        from headrace.store.remote import open_source
        from headrace.stream.supply import FolderSupply

        at = run.cfg.store.at
        return FolderSupply(open_source(at, run.folder.states, 4, run.cfg.serve.map_shards), far=at is not None)
    from headrace.raw_slice import with_codec
    from headrace.stream.fill import FillSupply

    cfg = with_codec(run.cfg, run.folder, run.target, run.progress)
    run.release_target()  # the worker loads its own
    return FillSupply(cfg, run.folder, run.progress)
