"""`headrace speculators train`: speculators' own trainer, reading a headrace store.

In: a states folder, and any flags of `speculators train`. Out: what their trainer writes; it runs unmodified, with one
more hidden-states backend registered.
"""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown

app = typer.Typer(help="Run speculators on headrace's states.", no_args_is_help=True)
_stderr = Console(stderr=True)


@app.callback()
def main() -> None:
    """Run speculators on headrace's states."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    ctx: typer.Context,
    states: Annotated[Path, typer.Option(help="states folder of a run, captured with capture.final_state")],
) -> None:
    """Train with speculators; every other flag is theirs (see `speculators train --help`)."""
    from headrace.errors import ConfigError

    with failures_shown(_stderr):
        try:
            from headrace.plugins.speculators import BACKEND, store_layer_ids
        except ModuleNotFoundError as exc:
            if exc.name != "hs_connectors":
                raise
            hint = "install headrace beside speculators (pip install speculators hs-connectors headrace)"
            raise ConfigError("speculators and hs-connectors in this environment", f"no {exc.name}", hint) from exc
        from speculators.cli import app as speculators

        chosen = ["--hidden-states-backend", BACKEND, "--headrace-states", str(states)]
        if not given("--target-layer-ids", ctx.args):
            chosen += ["--target-layer-ids", *map(str, store_layer_ids(states))]
        if not given("--on-missing", ctx.args) and not given("--config", ctx.args):
            chosen += ["--on-missing", "raise"]
        _stderr.print(f"headrace: speculators train {' '.join(chosen)} ...", markup=False, soft_wrap=True)
        logging.getLogger().handlers.clear()  # their program decides how it logs
        speculators(["train", *chosen, *ctx.args], standalone_mode=False)


def given(flag: str, args: list[str]) -> bool:
    """Whether a flag is among words, alone or with `=value`."""
    return any(word == flag or word.startswith(f"{flag}=") for word in args)
