"""Our stream beside a bare pyarrow Flight loop, over loopback, in alternating pairs.

In: a folder, seconds of each turn, pairs. Out: rows of claims, as JSON. Both sides of both have a process of their own.
Ours reads a states folder (page cache warm), sends what is asked for in small requests, checks every digest and joins
records; the bare loop sends batches from memory in one endless answer, and nobody looks at them. Records of 288 kB (the
demo's raw states of 50 tokens) are judged; 16 kB (100 tokens of its latent) and TLS are reported.

usage: loopback.py FOLDER SECONDS PAIRS
"""

import json
import statistics
import sys
from pathlib import Path

from sides import make_states
from turns import once, rate, serving

NEEDED = 0.8
SIZES = {"288 kB": (1000, 50, 5760), "16 kB": (8000, 100, 160)}  # records, tokens of each, bytes a token


def compare(root: Path, size: str, tls: bool, seconds: str, pairs: int) -> tuple[float, float, float]:
    """Medians over pairs: ours and theirs in bytes a second, and the ratio of ours to theirs."""
    folder, results, flag = root / size.replace(" ", ""), root / "results.jsonl", str(int(tls))
    make_states(folder, *SIZES[size], [])

    def ours() -> float:
        with serving("serve", str(folder), "127.0.0.1:0", flag) as (port, _):
            source = f"grpc{'+tls' if tls else ''}://127.0.0.1:{port}"
            return rate("read", str(folder), source, seconds, flag)

    def theirs() -> float:
        with serving("serve-flight", str(folder), flag) as (port, _):
            return rate("read-flight", str(folder), port, seconds, flag)

    found = []
    for pair in range(pairs):
        name = f"{size} tls {flag} {seconds} s pair {pair}"
        turns = [("ours", ours), ("theirs", theirs)]
        took = {who: once(results, f"{name} {who}", measure) for who, measure in turns[:: 1 if pair % 2 else -1]}
        found.append((took["ours"], took["theirs"], took["ours"] / took["theirs"]))
    mine, bare, ratio = (statistics.median(column) for column in zip(*found, strict=True))
    return mine, bare, ratio


def main(root: Path, seconds: str, pairs: int) -> None:
    """Measure all."""
    rows = []
    for size in SIZES:
        for tls in (False, True):
            judged = size == "288 kB" and not tls
            own = pairs if judged else max(1, pairs // 3)
            mine, bare, ratio = compare(root, size, tls, seconds, own)
            rows.append(
                (
                    f"loopback, records of {size}{', TLS' if tls else ''}: ours beside a bare Flight loop",
                    f"median ratio of {pairs} pairs at least {NEEDED}" if judged else f"reported, {own} pairs",
                    f"{ratio:.2f} ({mine / 1e6:.0f} and {bare / 1e6:.0f} MB/s)",
                    ratio >= NEEDED if judged else True,
                )
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
