"""`make prove-stream`: use of a link, loopback beside pyarrow's own Flight, and the tests of what dies on the way.

In: a folder for stores and results, and `small` or `full`. Out: claims. Measurements are scripts of benchmarks/stream
in processes of their own, which print their rows as JSON and go on from what the folder has. What dies, is damaged or
is refused is shown by tests; `full` runs the slow ones too.

usage: stream.py FOLDER [full]
"""

import json
import subprocess
import sys
from pathlib import Path

from claims import Claims

SCRIPTS = Path(__file__).parent.parent / "stream"
TURNS = {  # seconds of a turn, and turns
    "small": {"link": ("5", "1"), "loopback": ("3", "3")},
    "full": {"link": ("20", "5"), "loopback": ("10", "7")},
}
TESTS = {
    "every position once, in order, equal bytes, while workers are killed": ("tests/integration/test_fill.py",),
    "a run over a troubled stream has the weights of one from the folder": ("tests/integration/test_stream.py",),
    "supply, wire, secrets and limits": ("tests/stream", "tests/cli/test_serve.py"),
}


def main(folder: Path, size: str) -> None:
    """Check everything."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = Claims(f"the stream, {size}")
    for name, arguments in TURNS[size].items():
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(folder), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            claims.add(f"{name}.py ends", "exit status 0", str(done.returncode), False)
            continue
        for claim, needed, measured, holds in json.loads(done.stdout):
            claims.add(claim, needed, measured, holds)
    which = ["-m", "slow or not slow", "--timeout", "900"] if size == "full" else []
    for claim, paths in TESTS.items():
        command = [sys.executable, "-m", "pytest", *which, *paths]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        claims.add(claim, "its tests pass", last if done.returncode else "all pass", done.returncode == 0)
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "full" if sys.argv[2:] == ["full"] else "small")
