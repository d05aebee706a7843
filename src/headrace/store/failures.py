"""Samples the target could not give, and why.

In: a row, its id, a reason. Out: `failures.jsonl`, one digested line each, durable when `append` returns. Only the
store's writer writes here. A permanent failure is a hole for every reader; any other is tried again by capture.
A row whose line was damaged and set aside counts as missing again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.files import fsync_folder, write_atomic
from headrace.source import Hole
from headrace.store.append import AppendFile, make_durable_folder
from headrace.store.digested import dump_digested, load_digested

FILE_NAME = "failures.jsonl"
_HINT = "run store repair: it sets damaged lines aside, and capture tries their rows again"


@dataclass(frozen=True)
class Failure:
    """One sample that failed. `id` is 16 bytes in hex, as in the file."""

    row: int
    id: str
    reason: str
    permanent: bool
    generation: int


def read_failures(path: Path) -> dict[int, Failure]:
    """The last failure of each row; a torn last line is left out.

    Raises: StoreError naming a line that is damaged.
    """
    lines = enumerate(_lines(path)[0], start=1)
    return {failure.row: failure for failure in (_parse(line, f"{path} line {k}") for k, line in lines)}


def holes_of(failures: Mapping[int, Failure], has_record: Callable[[int], bool]) -> dict[int, Hole]:
    """By row, what failed for good and has no record."""
    return {
        row: Hole(row, bytes.fromhex(failure.id), failure.reason)
        for row, failure in failures.items()
        if failure.permanent and not has_record(row)
    }


def mend_failures(path: Path) -> None:
    """Cut off a torn last line, so that the next one starts on a line of its own. Needs the lock."""
    _, torn = _lines(path)
    if torn:
        file = AppendFile(path)
        file.truncate(path.stat().st_size - torn)
        file.sync()
        file.close()


def set_aside(path: Path, quarantine: Path) -> str | None:
    """Move damaged lines to the file of the same name in `quarantine`, keep the sound ones. Needs the lock.

    Returns: a sentence about it; None where no line is damaged.
    """
    sound, damaged = [], []
    for line in _lines(path)[0]:
        try:
            _parse(line, str(path))
            sound.append(line)
        except StoreError:
            damaged.append(line)
    if not damaged:
        return None
    make_durable_folder(quarantine)
    aside = AppendFile(quarantine / path.name)
    try:
        aside.write(b"".join(line + b"\n" for line in damaged))
        aside.sync()
    finally:
        aside.close()
    fsync_folder(quarantine)
    write_atomic(path, b"".join(line + b"\n" for line in sound))
    kept = f"{len(damaged)} damaged lines are in quarantine, {len(sound)} sound ones are kept"
    return f"{path.name}: {kept}; rows whose failure was lost count as missing again"


def append_failure(path: Path, failure: Failure) -> None:
    """Append one line and make it durable."""
    file = AppendFile(path)
    new = file.num_bytes == 0
    try:
        file.write(dump_digested(asdict(failure)).encode() + b"\n")
        file.sync()
    finally:
        file.close()
    if new:
        fsync_folder(path.parent)


def _lines(path: Path) -> tuple[list[bytes], int]:
    """The lines of the file, and how many bytes of a torn one follow them.

    A torn write never leaves a whole line with a byte behind it: that byte was its newline, and the line stands among
    the others with it, so that it is found damaged.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as exc:
        raise StoreError(f"a readable {path}", exc.strerror or str(exc), "restore it, or remove it") from exc
    *lines, end = content.split(b"\n")
    try:
        _parse(end[:-1], str(path))
    except StoreError:
        return lines, len(end)
    return [*lines, end], 0


def _parse(line: bytes, where: str) -> Failure:
    try:
        return Failure(**load_digested(line, where, hint=_HINT))
    except TypeError as exc:
        raise StoreError("the fields of a failure", f"{where}: {exc}", _HINT) from exc
