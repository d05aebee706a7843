"""Samples the target could not give, and why.

In: a row, its id, a reason. Out: `failures.jsonl`, one digested line each, durable when `append` returns. Only the
store's writer writes here. A permanent failure is a hole for every reader; any other is tried again by capture.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.store.append import AppendFile
from headrace.store.digested import dump_digested, load_digested

FILE_NAME = "failures.jsonl"


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
    return {failure.row: failure for failure in _parse(path, _whole_lines(path))}


def mend_failures(path: Path) -> None:
    """Cut off a torn last line, so that the next one starts on a line of its own. Needs the lock."""
    if path.exists():
        whole = sum(len(line) + 1 for line in _whole_lines(path))
        if whole != path.stat().st_size:
            file = AppendFile(path)
            file.truncate(whole)
            file.sync()
            file.close()


def append_failure(path: Path, failure: Failure) -> None:
    """Append one line and make it durable."""
    file = AppendFile(path)
    try:
        file.write(dump_digested(asdict(failure)).encode() + b"\n")
        file.sync()
    finally:
        file.close()


def _whole_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.exists() else b""
    return content.split(b"\n")[:-1]


def _parse(path: Path, lines: list[bytes]) -> list[Failure]:
    failures = []
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        try:
            failures.append(Failure(**load_digested(line, where)))
        except TypeError as exc:
            raise StoreError("the fields of a failure", f"{where}: {exc}", "see docs/formats/store-0.md") from exc
    return failures
