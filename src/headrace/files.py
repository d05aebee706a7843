"""Files that are whole or absent, and the record each stage keeps of what it made from what.

In: bytes or JSON for a path. Out: the file, published by rename after fsync of the file and then of its folder.
JSON lines that are appended may end torn and are read without the torn one.
A stage's folder holds `stage.json`: the identity of its inputs and settings, whether it finished, and its summary.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError

State = Literal["new", "resume", "done"]


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content.encode("utf-8") if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """A JSON object from a file. Raises: ConfigError, with the hint, for a file that is absent or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"a JSON object in {path}", str(exc), hint) from exc
    if not isinstance(value, dict):
        raise ConfigError(f"a JSON object in {path}", type(value).__name__, hint)
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it is not there; a torn last line is left out.

    Raises: ConfigError naming a line that is damaged.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"JSON in {path}:{number}", str(exc), "remove the line") from exc
        if not isinstance(value, dict):
            raise ConfigError(f"a JSON object in {path}:{number}", type(value).__name__, "remove the line")
        found.append(value)
    return found


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one line; what a kill left of a torn one is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as out:
        out.seek(0)
        content = out.read()
        out.truncate(content.rfind(b"\n") + 1)
        out.write(json.dumps(value).encode() + b"\n")


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder alone, until the end of the block or of the process; made if it is not there.

    Raises: ConfigError at once when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            hint = "wait for that process, or stop it; or choose another run folder"
            raise ConfigError(f"to be alone in {what} of {folder}", "another process is at it", hint) from exc
        yield
    finally:
        os.close(descriptor)


def stage_seconds(root: Path) -> dict[str, float]:
    """Seconds of each stage of a run, summed over every start, in the order first met; from `stages.jsonl`."""
    totals: dict[str, float] = {}
    path = root / "stages.jsonl"
    for line in read_json_lines(path):
        try:
            totals[line["stage"]] = round(totals.get(line["stage"], 0.0) + line["seconds"], 1)
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"stage and seconds in each line of {path}", str(line), "remove the line") from exc
    return totals


class Stage:
    """What a stage made, and from what; `stage.json` in the stage's folder."""

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any]) -> None:
        """Args: identity: JSON values that decide the output; any difference to an earlier run refuses."""
        self.folder = folder
        self.name = name
        self.identity = json.loads(json.dumps(identity))
        self._path = folder / "stage.json"

    def state(self) -> State:
        """Say whether the stage is new, begun or done.

        Raises: ConfigError naming the first field that differs from what the folder was made with.
        """
        if not self._path.exists():
            return "new"
        stored = self._found()
        for key in sorted({*stored["identity"], *self.identity}):
            was, now = stored["identity"].get(key), self.identity.get(key)
            if was != now:
                raise ConfigError(
                    f"{self.name} in {self.folder} made with the same {key}",
                    f"{was!r} there and {now!r} now",
                    "choose another run folder, or remove this stage's folder to make it again",
                )
        return "done" if stored["finished"] else "resume"

    def begin(self) -> None:
        """Write the identity before the first byte of output."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"stage": self.name, "identity": self.identity, "finished": False, "summary": {}})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the stage as done, with the figures a report needs."""
        write_json(
            self._path, {"stage": self.name, "identity": self.identity, "finished": True, "summary": dict(summary)}
        )

    def summary(self) -> dict[str, Any]:
        """The summary of a finished stage."""
        return dict(self._found()["summary"])

    def _found(self) -> dict[str, Any]:
        stored = read_stage(self.folder)
        if stored is None:
            raise ConfigError(f"a stage in {self.folder}", f"no {self._path}", "run the stage again")
        return stored


def read_stage(folder: Path) -> dict[str, Any] | None:
    """What `stage.json` of a folder says: `identity`, `finished`, `summary`; None where there is none.

    Raises: ConfigError for a damaged one.
    """
    path = folder / "stage.json"
    if not path.is_file():
        return None
    hint = f"restore {path}, or remove its folder to make this stage again"
    stored = read_json(path, hint)
    kinds = {"identity": dict, "finished": bool, "summary": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(stored.get(key), kind)]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} of the stage in {path}", "another content", hint)
    return stored
