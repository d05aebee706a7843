"""speculators' own trainer, one epoch: from our raw store through the plugin, and from its own files.

In: a folder, the python of an environment with speculators 0.9.0. Out: rows of claims, as JSON. Both read the same
states of a tiny target, with the same seed and order; every figure that their trainer logs is compared, and the weights
it saves.

usage: plugin.py FOLDER RIVAL_PYTHON
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests know how to run their trainer on a CPU

from tests.interchange.runs import captured
from tests.plugins.test_speculators import HELDOUT, LENGTHS, both_epochs

from headrace.testing.tiny_target import save_tiny_target


def main(folder: Path, python: str) -> None:
    """Print the rows."""
    os.environ["HEADRACE_SPECULATORS_PYTHON"] = python
    with tempfile.TemporaryDirectory(dir=folder) as base:
        tiny = save_tiny_target(Path(base) / "tiny", "qwen3")
        run = captured(tiny, Path(base) / "run", lengths=LENGTHS, heldout=HELDOUT)
        theirs, ours, same_weights = both_epochs(tiny, run, Path(base))
    steps = [line["train"]["loss"] for line in theirs if "train" in line]
    differ = sum(a != b for a, b in zip(theirs, ours, strict=False)) + abs(len(theirs) - len(ours))
    weights = "equal" if same_weights else "differ"
    told = f"{len(steps)} steps, {len(theirs)} lines of figures, {differ} differ; weights {weights}"
    holds = len(steps) >= 8 and len(set(steps)) == len(steps) and not differ and same_weights
    claim = "speculators 0.9.0 trains an epoch from our raw store as from its own files"
    print(json.dumps([(claim, "every figure and the weights equal", told, holds)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
