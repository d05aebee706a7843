"""`headrace codec`: fit a codec on a run's raw states, and say what a codec loses.

In: a run file, and what to fit. Out: a few lines for people, or `--json`; a folder that `capture.codec` names.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal

if TYPE_CHECKING:
    from headrace.config import RunFolder

app = typer.Typer(help="Fit a codec on raw states, and say what codecs lose.", no_args_is_help=True)
_stderr = Console(stderr=True)

File = Annotated[Path, typer.Argument(help="run file whose states were captured raw", metavar="RUN.yaml")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, beats the file; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="print as JSON on stdout")]
Drafter = Annotated[Path | None, typer.Option(help="exported drafter: keep what its fc reads; none: the strongest")]
Scheme = Annotated[str, typer.Option(help="rotate: equal bits, groups rotated; water: bits by energy")]


@app.command()
def fit(
    file: File,
    rank: Annotated[int, typer.Option(help="directions that are kept")],
    bits: Annotated[float, typer.Option(help="bits of each, on average")],
    out: Annotated[Path, typer.Option(help="folder for codec.json and basis.safetensors")],
    drafter: Drafter = None,
    scheme: Scheme = "rotate",
    tokens: Annotated[int, typer.Option(help="tokens to fit on, all sources in turn")] = 400_000,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Choose directions and bits from a run's raw states; judge them on held-out samples."""
    from headrace.calibrate import Wish, fit_codec
    from headrace.errors import ConfigError

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        if scheme not in ("rotate", "water"):
            raise ConfigError("scheme rotate or water", scheme, "see headrace codec fit --help")
        kind: Literal["rotate", "water"] = "rotate" if scheme == "rotate" else "water"
        folder, at = _raw_states(file, set_)
        found = fit_codec(folder, Wish(rank, bits, drafter, kind, tokens), out, progress, at)
    _print(found, json_)


@app.command()
def report(
    file: File,
    codec: Annotated[list[str], typer.Argument(help="names or folders of codecs", metavar="CODEC...")],
    plot: Annotated[Path | None, typer.Option(help="write the comparison as an SVG, too")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Lay codecs side by side on held-out samples: bytes, what is lost by tap and source, speed."""
    from headrace.calibrate import compare_codecs
    from headrace.report.codecs import draw_codecs

    with failures_shown(_stderr):
        folder, at = _raw_states(file, set_)
        found = compare_codecs(folder, codec, at)
        if plot is not None:
            draw_codecs(found, plot)
    _print(found, json_)


@app.command()
def transcode(
    file: File,
    codec: Annotated[str, typer.Argument(help="name or folder of a codec")],
    out: Annotated[Path, typer.Option(help="folder of the run that gets the states")],
    at: Annotated[str | None, typer.Option(help="address that gets the states, that run's store.at")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Encode a run's states again into another run's folder, without the target."""
    from headrace.config import RunFolder, load_run_file
    from headrace.transcode import transcode as encode_again

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        try:
            cfg = load_run_file(file, set_ or ()).run
            found = encode_again(cfg, RunFolder(Path(cfg.run)), RunFolder(out), codec, progress, at)
        finally:
            progress.end()
    _print(found, json_)


def _raw_states(file: Path, flags: list[str] | None) -> "tuple[RunFolder, str | None]":
    """The run's own folder and the address of its states, if they are at one; its raw slice where that is whole."""
    from headrace.config import RunFolder, load_run_file
    from headrace.files import read_stage

    cfg = load_run_file(file, flags or ()).run
    folder = RunFolder(Path(cfg.run))
    slice_ = RunFolder(folder.root / "slice")
    done = read_stage(slice_.states)
    return (slice_, None) if done is not None and done["finished"] else (folder, cfg.store.at)


def _print(found: Any, as_json: bool) -> None:
    sys.stdout.write(json.dumps(found, indent=None if as_json else 1, ensure_ascii=False) + "\n")
