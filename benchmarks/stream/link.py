"""How much of a link a draining reader uses, between two network namespaces.

In: a folder, seconds of each turn, turns. Out: rows of claims, as JSON. The namespaces are joined by a veth pair,
shaped to 1 Gbit/s in both directions (`tc tbf`); TLS, as beyond loopback always. A store whose pages are warm; payload
bytes alone count, so ids, masks, framing, TLS and headers are what is lost. Needs root, `ip` and `tc`.

usage: link.py FOLDER SECONDS TURNS
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sides import make_states
from turns import once, rate, serving

RATE_BITS = 10**9
NEEDED = 0.9
SERVER, READER = "10.91.0.1", "10.91.0.2"
# What is sent, records, tokens of each, bytes a token: Qwen3.6-27B's five taps, raw and 72 times smaller.
ARMS = {"raw, 51,200 bytes a token": (60, 100, 51_200), "a latent, 712 bytes a token": (600, 750, 712)}


@contextmanager
def shaped() -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces and the link between them. Gives: prefixes of commands inside each."""
    names = [f"headrace-{side}-{os.getpid()}" for side in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "hr-a", "netns", names[0], "type", "veth", "peer", "name", "hr-b", "netns", names[1])
        for name, device, address in zip(names, ("hr-a", "hr-b"), (SERVER, READER), strict=True):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            run(*inside, "ip", "link", "set", device, "up")
            limit = ("rate", f"{RATE_BITS}bit", "burst", "256kb", "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


def measure(folder: Path, seconds: str) -> float:
    """One turn: payload bytes a second."""
    with shaped() as (here, there), serving("serve", str(folder), f"{SERVER}:0", "1", prefix=here) as port:
        return rate("read", str(folder), f"grpc+tls://{SERVER}:{port}", seconds, "1", prefix=there)


def main(root: Path, seconds: str, turns: int) -> None:
    """Measure all."""
    rows = []
    for arm, (num_records, num_tokens, token_bytes) in ARMS.items():
        folder = root / f"link-{token_bytes}"
        make_states(folder, num_records, num_tokens, token_bytes, [SERVER])
        one = partial(measure, folder, seconds)
        name = f"link {token_bytes} {seconds} s turn"
        found = [once(root / "results.jsonl", f"{name} {turn}", one) for turn in range(turns)]
        goodput = statistics.median(found)
        share = goodput * 8 / RATE_BITS
        spread = f"{min(found) * 8 / RATE_BITS:.3f} to {max(found) * 8 / RATE_BITS:.3f}"
        carried = f"{goodput / token_bytes:,.0f} tokens/s"
        needed = f"payload at least {NEEDED} of the rate (median of {turns})"
        claim = f"1 Gbit/s between two namespaces, {arm}"
        rows.append((claim, needed, f"{share:.3f} ({spread}), {carried}", share >= NEEDED))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
