"""What both workers of the step benchmark share: a step for each line on stdin, timed; a JSON line for each step.

The line `profile` makes one more step, and tells where its time went.
"""

import json
import resource
import sys
import time
from collections.abc import Callable

MOST = 8  # operations of a profile


def serve(once: Callable[[], tuple[float, int]]) -> None:
    """Answer `step` lines until stdin ends. `once` gives the mean weighted loss and the number of supervised slots."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "profile":
            print(json.dumps({"profile": profile(once)}), flush=True)
            continue
        began = time.perf_counter()
        loss, supervised = once()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "supervised": supervised, "peak_bytes": peak}), flush=True)


def profile(once: Callable[[], tuple[float, int]]) -> list[dict[str, object]]:
    """The operations of one step by their own time, longest first: name, shapes, calls, seconds, share of the step."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as made:
        once()
    rows = made.key_averages(group_by_input_shape=True)
    total = sum(row.self_cpu_time_total for row in rows)
    longest = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:MOST]
    return [
        {
            "op": row.key,
            "shapes": [shape for shape in row.input_shapes if shape],
            "calls": row.count,
            "seconds": round(row.self_cpu_time_total / 1e6, 4),
            "share": round(row.self_cpu_time_total / total, 3),
        }
        for row in longest
    ]
