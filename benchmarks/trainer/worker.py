"""What both workers of the step benchmark share: a step for each line on stdin, timed; a JSON line for each step."""

import json
import resource
import sys
import time
from collections.abc import Callable


def serve(once: Callable[[], tuple[float, int]]) -> None:
    """Answer `step` lines until stdin ends. `once` gives the mean weighted loss and the number of supervised slots."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        loss, supervised = once()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "supervised": supervised, "peak_bytes": peak}), flush=True)
