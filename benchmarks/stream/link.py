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
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from sides import make_states
from turns import once, rate, serving

RATE_BITS = 10**9
NEEDED = 0.9
DELAY_S = 0.02  # in each direction, by a relay on the server's side
SERVER, READER = "10.91.0.1", "10.91.0.2"
# What is sent, records, tokens of each, bytes a token: Qwen3.6-27B's five taps, raw and 72 times smaller.
ARMS = {"raw, 51,200 bytes a token": (60, 100, 51_200), "a latent, 712 bytes a token": (600, 750, 712)}


@contextmanager
def shaped(rate_bits: float = RATE_BITS) -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces and the link between them. Gives: prefixes of commands inside each."""
    names = [f"headrace-{side}-{os.getpid()}" for side in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "hr-a", "netns", names[0], "type", "veth", "peer", "name", "hr-b", "netns", names[1])
        for name, device, address in zip(names, ("hr-a", "hr-b"), (SERVER, READER), strict=True):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "link", "set", device, "up")
            limit = ("rate", f"{rate_bits:.0f}bit", "burst", "256kb", "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


def measure(folder: Path, seconds: str, delay_s: float) -> float:
    """One turn: payload bytes a second."""
    with ExitStack() as stack:
        here, there = stack.enter_context(shaped())
        host = "127.0.0.1" if delay_s else SERVER
        port, _ = stack.enter_context(serving("serve", str(folder), f"{host}:0", "1", prefix=here))
        if delay_s:
            port, _ = stack.enter_context(serving("relay", str(folder), port, SERVER, str(delay_s), prefix=here))
        return rate("read", str(folder), f"grpc+tls://{SERVER}:{port}", seconds, "1", prefix=there)


def main(root: Path, seconds: str, turns: int) -> None:
    """Measure all."""
    rows = []
    for (arm, (num_records, num_tokens, token_bytes)), delay_s in product(ARMS.items(), (0.0, DELAY_S)):
        folder = root / f"link-{token_bytes}"
        make_states(folder, num_records, num_tokens, token_bytes, [SERVER])
        one = partial(measure, folder, seconds, delay_s)
        name = f"link {token_bytes} delay {delay_s} {seconds} s turn"
        found = [once(root / "results.jsonl", f"{name} {turn}", one) for turn in range(turns)]
        goodput = statistics.median(found)
        share = goodput * 8 / RATE_BITS
        spread = f"{min(found) * 8 / RATE_BITS:.3f} to {max(found) * 8 / RATE_BITS:.3f}"
        carried = f"{goodput / token_bytes:,.0f} tokens/s"
        needed = f"payload at least {NEEDED} of the rate (median of {turns})"
        claim = f"1 Gbit/s between two namespaces, {arm}" + (f", {DELAY_S * 1e3:.0f} ms later" if delay_s else "")
        judged = not delay_s  # a relay in Python takes much of a core itself
        told = f"{share:.3f} ({spread}), {carried}"
        rows.append((claim, needed if judged else "reported", told, share >= NEEDED or not judged))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
