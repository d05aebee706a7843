"""Where a large run of Qwen3.6-27B waits first: 8 to 512 trainer GPUs, 1 to 64 capture servers, raw and encoded states.

In: nothing, or `quick`. Out: the assumptions, a table, and what to buy. Nothing here was measured on such machines: the
clock is made up (model.py), the rates are those of the planner's catalogue. `check.py` compares the same model with a
real run of two processes.

usage: scale.py [quick] [--json]
"""

import json
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from model import Outcome, Simulation, World

RAW = 51_200.0  # bytes a token: five taps of 5,120 bfloat16 numbers
ENCODED = RAW / 72  # a latent of 288 coordinates at 4 bits a token, measured on the demo target (docs/codecs.md)
GB = 1e9
ASSUMED = World(
    num_ranks=8,
    num_servers=1,
    rank_rate=2_874.0,  # H100, 512 anchors a sample, 44 % of its peak
    server_rate=8 * 8_120.0,  # 8 H100, bfloat16 prefill at 0.6 of the sum of kernel times
    bytes_per_token=RAW,
    server_link=3.1 * GB,  # 25 GbE
    node_link=3.1 * GB,
    step_tokens=16_384,
    gradient_s=2 * 6.9 * GB / (50 * GB),  # 1.73 billion float32 gradients, ring over NDR 400 Gb/s
)
TOLD = """Assumed, not measured:
- trainers: H100, {rank_rate:,.0f} tokens/s each (512 anchors), 8 a node; 16,384 tokens of a global step for each
- capture servers: 8 H100 each, {server_rate:,.0f} tokens/s of prefill in bfloat16; whole windows of 128 samples
- links: 25 GbE ({server_link:.1e} bytes/s) out of each server and into each node; no loss, no other traffic
- gradients: {gradient_s:.2f} s a step, not overlapped with anything
- samples: lognormal lengths, mean 800 tokens, at most 8,192; servers work up to {ahead_tokens:.0f} global steps ahead
- nothing is kept from an earlier epoch, so every token is captured; with everything kept, only links count
- a quarter of the servers die halfway, noticed after {notice_s:.0f} s; others capture what these had not delivered"""
STEPS = {8: 32, 32: 24, 128: 12, 512: 8}
SERVERS = (1, 4, 16, 64)
BUY = {
    "trainers": "nothing: trainers are the limit",
    "capture": "capture GPUs, or keep states for later epochs",
    "server link": "an encoding, then faster links out of the servers",
    "node link": "an encoding, then faster links into the trainers",
    "distance": "memory, to work further ahead: windows come unevenly",
}


def lengths(num_samples: int) -> Any:
    """Lengths of samples: int64 [N]."""
    drawn = np.random.default_rng(0).lognormal(np.log(800) - 0.32, 0.8, num_samples)
    return np.clip(drawn, 16, 8192).astype(np.int64)


def simulate(num_ranks: int, num_servers: int, num_bytes: float, steps: int) -> Outcome:
    """One cell of the table; a quarter of the servers dies halfway, where there are four or more."""
    world = replace(
        ASSUMED,
        num_ranks=num_ranks,
        num_servers=num_servers,
        bytes_per_token=num_bytes,
        step_tokens=ASSUMED.step_tokens * num_ranks,
        num_dead=num_servers // 4,
    )
    num_samples = int(world.step_tokens * (steps + world.ahead_tokens + 2) / 700)
    return Simulation(world, lengths(num_samples)).run(steps)


def main(quick: bool, as_json: bool) -> None:
    """Print the table."""
    began = time.monotonic()
    if not as_json:
        print(TOLD.format(**asdict(ASSUMED)))
        print("\n| states | trainers | servers | s a step | data wait | after deaths | capture busy | server link | "
              "node link | buffer a node | buffer a server | buy |\n|" + "---|" * 12)  # fmt: skip
    cells = []
    for name, num_bytes in (("raw", RAW), ("1/72", ENCODED)):
        for num_ranks in list(STEPS)[: 2 if quick else None]:
            for num_servers in SERVERS[: 3 if quick else None]:
                found = simulate(num_ranks, num_servers, num_bytes, STEPS[num_ranks])
                cell = {"states": name, "ranks": num_ranks, "servers": num_servers, **asdict(found)}
                cells.append({**cell, "bottleneck": found.bottleneck})
                if not as_json:
                    print(_row(name, num_ranks, num_servers, found), flush=True)
    if as_json:
        print(json.dumps(cells))
    else:
        print(f"\nsimulated in {time.monotonic() - began:.0f} s")


def _row(name: str, num_ranks: int, num_servers: int, found: Outcome) -> str:
    use = " | ".join(f"{found.use[key]:.0%}" for key in ("capture", "server link", "node link"))
    after = f"{found.wait_share_after:.0%}" if num_servers >= 4 else "-"
    return (
        f"| {name} | {num_ranks} | {num_servers} | {found.step_s:.1f} | {found.wait_share:.0%} | {after} | {use} | "
        f"{found.node_buffer / GB:.2f} GB | {found.server_buffer / GB:.2f} GB | {BUY[found.bottleneck]} |"
    )


if __name__ == "__main__":
    main("quick" in sys.argv, "--json" in sys.argv)
