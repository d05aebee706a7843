"""`make prove-stream`: a link's use, loopback beside pyarrow's own Flight, chaos, memory, strangers, and the tests.

In: a folder for stores and results, the run folder of `make demo`, and `small` or `full`. Out: claims. Measurements are
scripts of benchmarks/stream in processes of their own, which print their rows as JSON; those of link and loopback go on
from what the folder has. `full` runs the slow tests too.

usage: stream.py FOLDER RUN [full]
"""

import json
import subprocess
import sys
from pathlib import Path

from claims import Claims

SCRIPTS = Path(__file__).parent.parent / "stream"
ARGUMENTS = {  # of each script, as its usage says; RUN stands for the run folder
    "small": {
        "link": ("5", "1"),
        "demand": ("RUN", "15"),
        "loopback": ("2", "3"),
        "chaos": ("1",),
        "hostile": ("0.8", "5", "300"),
    },
    "full": {
        "link": ("20", "5"),
        "demand": ("RUN", "60"),
        "loopback": ("10", "7"),
        "chaos": ("4",),
        "hostile": ("4", "120", "1000"),
    },
}
TESTS = {
    "every position once, in order, equal bytes, while workers are killed; offline, streamed and half kept train the "
    "same weights": ("tests/integration/test_fill.py",),
    "a run over a troubled stream has the weights of one from the folder": ("tests/integration/test_stream.py",),
    "wrong, missing and foreign secrets, damaged bytes, unknown commands are refused, and tell nothing": (
        "tests/stream",
        "tests/cli/test_serve.py",
    ),
}


def main(folder: Path, run: str, size: str) -> None:
    """Check everything."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = Claims(f"the stream, {size}")
    for name, arguments in ARGUMENTS[size].items():
        own = [run if argument == "RUN" else argument for argument in arguments]
        where = folder / "chaos" if name == "chaos" else folder  # it begins with an empty one
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(where), *own]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            claims.add(f"{name}.py ends", "exit status 0", str(done.returncode), False)
            continue
        for claim, needed, measured, holds in json.loads(done.stdout.splitlines()[-1]):
            claims.add(claim, needed, measured, holds)
    which = ["-m", "slow or not slow", "--timeout", "900"] if size == "full" else []
    for claim, paths in TESTS.items():
        command = [sys.executable, "-m", "pytest", *which, *paths]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        claims.add(claim, "its tests pass", last if done.returncode else "all pass", done.returncode == 0)
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "full" if sys.argv[3:] == ["full"] else "small")
