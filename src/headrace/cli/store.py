"""`headrace store`: look at states, check every byte of them, mend them, take records out, join stores.

In: a states folder, or an address. Out: a few lines for people, or `--json`; verify ends with exit code 8 when anything
is damaged.
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.cli.codec import transcode
from headrace.cli.failure import failures_shown
from headrace.cli.progress import Terminal
from headrace.errors import StoreError

app = typer.Typer(help="Look at states in a folder or at an address, check, mend, change them.", no_args_is_help=True)
_stderr = Console(stderr=True)

Place = Annotated[str, typer.Argument(help="states folder of a run, or an address as in s3://BUCKET/PREFIX")]
Json = Annotated[bool, typer.Option("--json", help="print as JSON on stdout")]


@app.command()
def info(place: Place, json_: Json = False) -> None:
    """Say what a store holds."""
    from headrace.store.remote import open_reader

    with failures_shown(_stderr):
        reader = open_reader(place)
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
def verify(place: Place, json_: Json = False) -> None:
    """Check every digest; name what is damaged."""
    from headrace.store.objects import is_address
    from headrace.store.remote_verify import verify_objects
    from headrace.store.verify import verify as verify_store

    progress, remote = Terminal(_stderr), is_address(place)
    with failures_shown(_stderr):
        shown = _shown(progress, "verify")
        damages = verify_objects(place, shown) if remote else verify_store(Path(place), shown)
        progress.end()
        if json_:
            sys.stdout.write(json.dumps({"damages": [asdict(d) for d in damages]}, ensure_ascii=False) + "\n")
        for d in damages if not json_ else ():
            sys.stdout.write(f"{d.path} at byte {d.offset}, row {d.row}: {d.found}\n")
        if damages:
            raise StoreError("no damage", f"{len(damages)} damaged places", f"run `headrace store repair {place}`")
        progress.note("every byte is as it was written")


@app.command()
def repair(
    place: Place,
    indexes_only: Annotated[
        bool, typer.Option("--indexes-only", help="mend journal or log, read no record that need not be read")
    ] = False,
    json_: Json = False,
) -> None:
    """Mend the index, remove what is left over, move damaged shards to quarantine; capture makes lost rows again."""
    from headrace.store.objects import is_address
    from headrace.store.remote_repair import repair_objects
    from headrace.store.repair import repair as repair_store

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        shown, payloads = _shown(progress, "verify"), not indexes_only
        remote = is_address(place)
        repaired = repair_objects(place, payloads, shown) if remote else repair_store(Path(place), payloads, shown)
        progress.end()
    if json_:
        _print(asdict(repaired))
    for note in repaired.notes if not json_ else ():
        sys.stdout.write(note + "\n")


@app.command()
def ls(
    place: Place,
    failed: Annotated[bool, typer.Option("--failed", help="rows the target could not give, and why")] = False,
    limit: Annotated[int | None, typer.Option(help="stop after so many")] = None,
    json_: Json = False,
) -> None:
    """List records by row; with --json one object a line."""
    from headrace.store.listing import list_failures, list_records
    from headrace.store.remote import open_reader

    with failures_shown(_stderr):
        reader = open_reader(place)
        for number, entry in enumerate(list_failures(reader) if failed else list_records(reader)):
            if number == limit:
                break
            if json_:
                _print(entry)
            else:
                sys.stdout.write("  ".join(f"{name} {value}" for name, value in entry.items()) + "\n")


@app.command()
def cat(
    place: Place,
    row: Annotated[int, typer.Argument(help="row of the prepared set")],
    tokens: Annotated[str | None, typer.Option(help="only the segments that hold tokens START:END")] = None,
    payload: Annotated[Path | None, typer.Option(help="write the encoded states to this file")] = None,
    json_: Json = False,
) -> None:
    """Show one record, its digests checked."""
    from headrace.files import write_atomic
    from headrace.store.listing import describe
    from headrace.store.remote import open_reader

    with failures_shown(_stderr):
        reader = open_reader(place)
        id = reader.id_of(row)
        segments = reader.read(row, id).segments if tokens is None else reader.read_tokens(row, id, *_range(tokens))
        if payload is not None:
            write_atomic(payload, b"".join(segment.payload for segment in segments))
    shown = describe(segments)
    if json_:
        _print(shown)
    for name, value in shown.items() if not json_ else ():
        sys.stdout.write(f"{name}: {value}\n")


@app.command()
def rm(
    place: Place,
    rows: Annotated[list[int] | None, typer.Argument(help="rows of the prepared set", metavar="ROW...")] = None,
    superseded: Annotated[bool, typer.Option("--superseded", help="also what newer records supersede")] = False,
    json_: Json = False,
) -> None:
    """Remove records for good and free their bytes; capture makes the rows again."""
    from headrace.store.objects import is_address
    from headrace.store.remote_remove import remove_objects
    from headrace.store.remove import remove

    progress = Terminal(_stderr)
    with failures_shown(_stderr):
        if not rows and not superseded:
            raise StoreError("rows to remove, or --superseded", "neither", "see headrace store rm --help")
        if is_address(place):
            removed = remove_objects(place, rows or (), superseded, _shown(progress, "remove", "shards"))
            progress.end()
        else:
            removed = remove(Path(place), rows or (), superseded)
    if json_:
        _print(asdict(removed))
    else:
        sys.stdout.write(f"{removed.num_segments} segments removed, {removed.freed_bytes:,} bytes free again\n")


@app.command()
def merge(
    places: Annotated[
        list[str], typer.Argument(help="states folders or addresses, of one prepared set", metavar="PLACE...")
    ],
    out: Annotated[str, typer.Option(help="states folder or address that gets every row")],
    json_: Json = False,
) -> None:
    """Join stores that hold parts of one prepared set."""
    from headrace.config import StoreConfig
    from headrace.store.merge import merge as merge_stores

    progress, own = Terminal(_stderr), StoreConfig()
    with failures_shown(_stderr):
        shown = _shown(progress, "merge", "records")
        merged = merge_stores(places, out, own.shard_bytes, own.shard_seconds, shown)
        progress.end()
        if json_:
            _print(asdict(merged))
        else:
            sys.stdout.write(f"{merged.num_records} records and {merged.num_failures} failures in {out}\n")
        if merged.damaged:
            rows = ", ".join(map(str, merged.damaged[:8]))
            found = f"{len(merged.damaged)} damaged wherever they lie, rows {rows}"
            raise StoreError("every record intact in one of the stores", found, "capture makes them again")


app.command()(transcode)


def _shown(progress: Terminal, what: str, unit: str = "bytes") -> Any:
    """A bar that learns how much there is with the first report."""
    begun = False

    def show(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            progress.start(what, total, unit)
            begun = True
        progress.advance(done)

    return show


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise StoreError("tokens as START:END", text, "for example --tokens 0:512")
    return int(found[1]), int(found[2])


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value, default=str, ensure_ascii=False) + "\n")
