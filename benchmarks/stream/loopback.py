"""Our stream beside a bare pyarrow Flight loop, over loopback, in alternating pairs.

In: a folder, seconds of each turn, pairs. Out: rows of claims, as JSON. Both sides of both have a process of their own.
Ours reads a states folder, or maps it (serve.map_shards), page cache warm, sends what is asked for in small requests,
checks every digest and joins records; the bare loop sends batches from memory in one endless answer, and nobody looks
at them. Records of 288 kB (the
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


def compare(root: Path, size: str, tls: bool, seconds: str, pairs: int) -> dict[str, list[float]]:
    """Bytes a second of each way of ours and of theirs, a number for each turn."""
    folder, results, flag = root / size.replace(" ", ""), root / "results.jsonl", str(int(tls))
    make_states(folder, *SIZES[size], [])

    def ours(*how: str) -> float:
        with serving("serve", str(folder), "127.0.0.1:0", flag, *how) as (port, _):
            source = f"grpc{'+tls' if tls else ''}://127.0.0.1:{port}"
            return rate("read", str(folder), source, seconds, flag)

    def theirs() -> float:
        with serving("serve-flight", str(folder), flag) as (port, _):
            return rate("read-flight", str(folder), port, seconds, flag)

    turns = [("read", ours), ("theirs", theirs), ("mapped", lambda: ours("mapped"))]
    found: dict[str, list[float]] = {who: [] for who, _ in turns}
    for pair in range(pairs):
        name = f"{size} tls {flag} {seconds} s pair {pair}"
        for who, measure in turns[:: 1 if pair % 2 else -1]:
            found[who].append(once(results, f"{name} {who}", measure))
    return found


def main(root: Path, seconds: str, pairs: int) -> None:
    """Measure all."""
    rows = []
    for size in SIZES:
        for tls in (False, True):
            judged = size == "288 kB" and not tls
            found = compare(root, size, tls, seconds, pairs if judged else max(1, pairs // 3))
            for how in ("read", "mapped"):
                ratio = statistics.median(a / b for a, b in zip(found[how], found["theirs"], strict=True))
                mine, bare = statistics.median(found[how]) / 1e6, statistics.median(found["theirs"]) / 1e6
                rows.append(
                    (
                        f"loopback, records of {size}{', TLS' if tls else ''}, {how}: ours beside a bare Flight loop",
                        f"median ratio of {pairs} pairs at least {NEEDED}" if judged else "reported",
                        f"{ratio:.2f} ({mine:.0f} and {bare:.0f} MB/s)",
                        ratio >= NEEDED if judged else True,
                    )
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
