"""`make prove-demo`: the demo from nothing, within its time, above its floors, losslessly.

In: a fresh run folder (given, must not exist). Out: claims. The target's wheel is fetched and dequantised if it is not
cached; `--fresh-target` puts the cache into the run folder so that this, too, is timed.

usage: demo.py RUN_FOLDER [--fresh-target]
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from claims import Claims

MINUTES = 15


def main(folder: Path, fresh_target: bool) -> None:
    """Run the demo and check what it wrote."""
    if folder.exists():
        sys.exit(f"{folder} exists; give a folder that does not")
    environment = dict(os.environ)
    if fresh_target:
        environment["HEADRACE_CACHE"] = str(folder.resolve().with_name(folder.name + "-cache"))
    started = time.monotonic()
    command = [str(Path(sys.executable).with_name("headrace")), "run", "examples/demo.yaml", "--set", f"run={folder}"]
    done = subprocess.run(command, env=environment, check=False)
    seconds = time.monotonic() - started
    claims = Claims("the demo")
    claims.add("headrace run examples/demo.yaml ends well", "exit 0", f"exit {done.returncode}", done.returncode == 0)
    if done.returncode != 0:
        claims.close()
    claims.add(
        "wall time on this machine", f"at most {MINUTES} min", f"{seconds / 60:.1f} min", seconds <= MINUTES * 60
    )
    results = json.loads((folder / "results.json").read_text())
    claims.add("held-out τ", "at least 1.6", f"{results['tau']:.3f} {results['tau_interval']}", results["tau"] >= 1.6)
    for name in ("no_features", "prompt_lookup"):
        margin = results[f"margin_{name}"]
        claims.add(
            f"margin over {name.replace('_', ' ')} (τ {results[f'tau_{name}']:.3f})",
            "95 % interval above 0",
            f"{margin['value']:+.3f} ({margin['low']:+.3f} to {margin['high']:+.3f})",
            margin["low"] > 0,
        )
    claims.add(
        f"greedy identity on all {results['num_prompts']} held-out prompts, {results['num_ties']} ties",
        "true",
        str(results["greedy_identical"]).lower(),
        results["greedy_identical"] is True,
    )
    page = (folder / "report.html").read_text()
    claims.add("report.html stands alone", "no script, link or image", f"{len(page):,} bytes", "<script" not in page)
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--fresh-target" in sys.argv[2:])
