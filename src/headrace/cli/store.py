"""`headrace store`: look at a states folder, check every byte of it, mend it.

In: a states folder. Out: a few lines for people, or `--json`; verify ends with exit code 8 when anything is damaged.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal
from headrace.errors import StoreError

app = typer.Typer(help="Look at a states folder, check it, mend it.", no_args_is_help=True)
_stderr = Console(stderr=True)

Folder = Annotated[Path, typer.Argument(help="states folder of a run")]
Json = Annotated[bool, typer.Option("--json", help="print as JSON on stdout")]


@app.command()
def info(folder: Folder, json_: Json = False) -> None:
    """Say what a states folder holds."""
    from headrace.store.reader import StoreReader

    with failures_shown(_stderr):
        reader = StoreReader(folder)
        missing = reader.missing_shards()
        found = {
            "num_records": reader.num_records,
            "num_tokens": reader.num_tokens,
            "num_trained": reader.num_trained,
            "stored_bytes": reader.stored_bytes,
            "num_failures": len(reader.failures),
            "missing_shards": missing,
            "identity": reader.manifest.identity(),
        }
        reader.close()
    if missing:
        text = f"missing shards: {len(missing)}; their records cannot be read: restore them, or capture again"
        _stderr.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.stdout.write(json.dumps(found, indent=None if json_ else 1, ensure_ascii=False) + "\n")


@app.command()
def verify(folder: Folder, json_: Json = False) -> None:
    """Check every digest; name what is damaged."""
    from headrace.store.verify import verify as verify_store

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        progress.start("verify", None, "shards")
        damages = verify_store(folder, lambda done, total: progress.advance(done, of=total))
        progress.end()
        if json_:
            sys.stdout.write(json.dumps({"damages": [asdict(d) for d in damages]}, ensure_ascii=False) + "\n")
        for d in damages if not json_ else ():
            sys.stdout.write(f"{d.path} at byte {d.offset}, row {d.row}: {d.found}\n")
        if damages:
            raise StoreError("no damage", f"{len(damages)} damaged places", f"run `headrace store repair {folder}`")
        progress.note("every byte is as it was written")


@app.command()
def repair(folder: Folder, json_: Json = False) -> None:
    """Rebuild the index, move damaged shards to quarantine; capture makes lost rows again."""
    from headrace.store.repair import repair as repair_store

    with failures_shown(_stderr):
        repaired = repair_store(folder)
    if json_:
        sys.stdout.write(json.dumps(asdict(repaired), default=str, ensure_ascii=False) + "\n")
    for note in repaired.notes if not json_ else ():
        sys.stdout.write(note + "\n")
