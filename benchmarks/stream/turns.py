"""Starting sides, and results that a stopped script goes on from.

In: commands of sides.py, under a prefix such as `ip netns exec NAME`. Out: what a reading side measured; lines in
results.jsonl, one a turn, so that a script that was stopped measures only what is missing.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.files import append_json_line, read_json_lines

SIDES = str(Path(__file__).parent / "sides.py")


@contextmanager
def serving(*arguments: str, prefix: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A serving side in a process of its own. Gives: its port and process id."""
    process = subprocess.Popen([*prefix, sys.executable, SIDES, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        port = process.stdout.readline().strip()
        assert port, f"a server has ended: run {SIDES} {' '.join(arguments)} by hand"
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def rate(*arguments: str, prefix: Sequence[str] = ()) -> float:
    """Payload bytes a second that a reading side measured."""
    command = [*prefix, sys.executable, SIDES, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    return float(found["bytes"] / found["seconds"])


def once(results: Path, name: str, measure: Callable[[], float]) -> float:
    """A measurement by name: what results.jsonl has of it, or a new one."""
    for line in read_json_lines(results):
        if line["name"] == name:
            return float(line["value"])
    value = measure()
    append_json_line(results, {"name": name, "value": value})
    return value
