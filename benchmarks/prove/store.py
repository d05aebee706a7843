"""`make prove-store`: crashes, power loss, bit flips, a million records, speed, a stalled disk, their trainer.

In: a folder for stores that are removed again, the python of an environment with speculators 0.9.0, and `small` or
`full`. Out: claims. Each check is a script of benchmarks/store in a process of its own, which prints its rows as JSON.

usage: store.py FOLDER RIVAL_PYTHON [full]
"""

import json
import subprocess
import sys
from pathlib import Path

from claims import Claims

SCRIPTS = Path(__file__).parent.parent / "store"
CHECKS = {
    "small": {
        "crash": ("15",),
        "power": ("1", "4"),
        "flips": ("200",),
        "scale": ("50000", "500"),
        "stall": ("600", "2"),
        "throughput": ("0.1",),
        "plugin": (),
    },
    "full": {
        "crash": ("40",),
        "power": ("3", "1"),
        "flips": ("1000",),
        "scale": ("913786", "10000"),
        "stall": ("2000", "10"),
        "throughput": ("2",),
        "plugin": (),
    },
}


def main(folder: Path, rival: str, size: str) -> None:
    """Check everything."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = Claims(f"the store, {size}")
    for name, arguments in CHECKS[size].items():
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(folder), *arguments]
        if name in ("throughput", "plugin"):
            command.append(rival)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            claims.add(f"{name}.py ends", "exit status 0", str(done.returncode), False)
            continue
        for claim, needed, measured, holds in json.loads(done.stdout):
            claims.add(claim, needed, measured, holds)
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "full" if sys.argv[3:] == ["full"] else "small")
