"""What taking states costs a vLLM server on the CPU: five ways of it, turn by turn on the same machine.

In: a folder, the python of vLLM's environment, a fitted latent, how many prompts a turn and how many rounds. Out: rows
of claims, as JSON, and every turn in `turns.jsonl` of the folder, from which a stopped run goes on. Four servers are
up together and one works at a time: bare vLLM, and three that extract states. The bar is a server that extracts and
throws them away; it is asked on the same servers that send states, just before or after them.

usage: throughput.py FOLDER PYTHON CODEC_FOLDER PROMPTS ROUNDS
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import urllib3
from safetensors.numpy import load

from headrace.capture.engine_launch import Wish, prepared_engine
from headrace.config import RunFile, RunFolder
from headrace.files import append_json_line, read_json_lines
from headrace.progress import Silent
from headrace.target.endpoints import Endpoint, Request
from headrace.target.transformers_target import target_folder
from headrace.target.vllm_command import command, drafter_arguments, find_vllm, variables
from headrace.target.vllm_process import START_S, EngineProcess

NUM_TOKENS, IN_FLIGHT, PORT = 192, 6, 8420
FLAGS = ["--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "1024", "--max-num-seqs", "16"]
# The same for every server; the cache is small so that four fit.
SAME = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_KVCACHE_SPACE": "1"}
NEEDED = 0.9
Turn = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One way: the server that is asked, and how; `ask` returns the bytes of states that came."""

    name: str
    server: str
    ask: Callable[[Endpoint, tuple[int, ...]], int]


def plain(endpoint: Endpoint, ids: tuple[int, ...]) -> int:
    """Ask for no states; a server that extracts throws them away."""
    endpoint.ask(Request(ids, None))
    return 0


def payload(endpoint: Endpoint, ids: tuple[int, ...]) -> int:
    """Take what the engine encoded."""
    delivery = endpoint.ask(Request(ids)).delivery
    assert delivery is not None
    return delivery.num_bytes


def from_file(endpoint: Endpoint, ids: tuple[int, ...]) -> int:
    """Read the file that the answer names, and remove it."""
    body = Request(ids, None).body(endpoint.file.model, "")
    answer = urllib3.request("POST", f"{endpoint.file.url}/v1/completions", json=body, timeout=600, retries=False)
    path = Path(answer.json()["kv_transfer_params"]["hidden_states_path"])
    while not path.exists():
        time.sleep(0.002)
    content = path.read_bytes()
    path.unlink()
    assert load(content)["token_ids"].tolist() == list(ids)
    return len(content)


ARMS = (
    Arm("bare", "bare", plain),
    Arm("bar beside raw", "raw", plain),
    Arm("raw", "raw", payload),
    Arm("bar beside latent", "latent", plain),
    Arm("latent", "latent", payload),
    Arm("file", "file", from_file),
)


@dataclass
class Server:
    """A running server and its client."""

    endpoint: Endpoint
    group: int

    def usage(self) -> tuple[float, int]:
        """CPU seconds of all its processes so far, and the resident bytes of its largest, the worker."""
        seconds, largest = 0.0, 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == self.group:
                seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                largest = max(largest, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
        return seconds, largest


@contextmanager
def servers(folder: Path, python: str, codec: str) -> Iterator[dict[str, Server]]:
    """All four, started together."""
    codecs = {"raw": "raw", "latent": codec, "file": "raw"}
    with ExitStack() as stack:
        found: dict[str, tuple[EngineProcess, Path]] = {}
        for n, (name, setting) in enumerate(codecs.items()):
            run = {"target": {"dtype": "float32", "engine": "vllm"}, "capture": {"codec": setting, "dtype": "bfloat16"}}
            engine = {"python": python, "port": PORT + n, "flags": [*FLAGS, "--no-enable-prefix-caching"]}
            cfg = RunFile.model_validate({**run, "run": str(folder / name), "engine": engine})
            wish = Wish(name, to_files=name == "file")
            one = stack.enter_context(prepared_engine(cfg, RunFolder(folder / name), wish, Silent()))
            log = one.path.with_name("log")
            child = stack.enter_context(EngineProcess(one.command, one.added, log, one.file.url))
            found[name] = (child, one.path.parent)
        found["bare"] = (stack.enter_context(bare(folder, python)), found["raw"][1])
        yield {name: opened(name, *one) for name, one in found.items()}


def bare(folder: Path, python: str) -> EngineProcess:
    """A server of the same model, with no speculative configuration and no connector."""
    vllm, url = find_vllm(python), f"http://127.0.0.1:{PORT + 9}"
    flags = [*FLAGS, "--no-enable-prefix-caching"]
    arguments = drafter_arguments(str(target_folder("demo")), "demo", url, "float32", None, 0, flags)
    return EngineProcess(command(vllm, arguments), variables(vllm, os.environ), folder / "bare.log", url)


def opened(name: str, child: EngineProcess, described: Path) -> Server:
    """Wait for a server and open its client; the bare one is described by no engine.json of its own."""
    print(f"throughput: {name} healthy after {child.wait_healthy(START_S):.0f} s", file=sys.stderr)
    endpoint = Endpoint(described, 600.0, IN_FLIGHT)
    endpoint.file = replace(endpoint.file, url=child.url)
    return Server(endpoint, child.pid)


def turn(arm: Arm, server: Server, prompts: Sequence[tuple[int, ...]]) -> Turn:
    """Ask for all prompts, so many at a time."""
    cpu, began = server.usage()[0], time.monotonic()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        moved = sum(pool.map(lambda ids: arm.ask(server.endpoint, ids), prompts))
    seconds = time.monotonic() - began
    after, resident = server.usage()
    tokens = sum(map(len, prompts))
    return {
        "arm": arm.name, "tokens_s": tokens / seconds, "tokens_cpu_s": tokens / (after - cpu), "resident": resident,
        "bytes_per_token": moved / tokens,
    }  # fmt: skip


def prompts_of(seed: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Distinct prompts, which share no beginning with those of any other turn."""
    ids = np.random.default_rng(list(seed)).integers(100, 49_000, (count, NUM_TOKENS))
    return [tuple(own) for own in ids.tolist()]


def measure(folder: Path, python: str, codec: str, num_prompts: int, rounds: int) -> list[Turn]:
    """Every turn of every round; those in `turns.jsonl` are kept."""
    path = folder / "turns.jsonl"
    turns = list(read_json_lines(path))
    missing = [n for n in range(rounds) if sum(one["round"] == n for one in turns) < len(ARMS)]
    if not missing:
        return turns
    with servers(folder, python, codec) as running:
        for number, arm in enumerate(ARMS):  # what is compiled or allocated at a first request
            turn(arm, running[arm.server], prompts_of((0, number), 4))
        for n in missing:
            done = {one["arm"] for one in turns if one["round"] == n}
            for number, arm in list(enumerate(ARMS))[:: 1 if n % 2 else -1]:
                if arm.name not in done:
                    found = {"round": n, **turn(arm, running[arm.server], prompts_of((1, n, number), num_prompts))}
                    append_json_line(path, found)
                    turns.append(found)
                    print(f"throughput: {found}", file=sys.stderr)
    return turns


def rows(turns: Sequence[Turn], rounds: int) -> list[tuple[str, str, str, bool]]:
    """Claims of what was measured."""

    def of(arm: str, key: str) -> list[float]:
        return [float(one[key]) for one in turns if one["arm"] == arm][:rounds]

    def ratios(arm: str, bar: str, key: str) -> list[float]:
        return [own / other for own, other in zip(of(arm, key), of(bar, key), strict=True)]

    found = []
    for name in ("raw", "latent"):
        by_time, by_cpu = (ratios(name, f"bar beside {name}", key) for key in ("tokens_s", "tokens_cpu_s"))
        share = statistics.median(by_time)
        told = f"{share:.3f} ({min(by_time):.2f} to {max(by_time):.2f}); by CPU time {statistics.median(by_cpu):.3f}"
        claim = f"{name}: tokens a second over those of the same server that throws states away, median of {rounds}"
        found.append((claim, f"at least {NEEDED}", told, share >= NEEDED))
    for arm in ARMS:
        speed, cpu, size, resident = (
            statistics.median(of(arm.name, key)) for key in ("tokens_s", "tokens_cpu_s", "bytes_per_token", "resident")
        )
        told = f"{speed:.0f} tok/s; {cpu:.0f} by CPU second; {size:.0f} bytes a token; worker {resident / 1e9:.2f} GB"
        found.append((f"{arm.name}: speed, bytes moved, host memory", "beside the claims", told, speed > 0))
    return found


def main() -> None:
    """Measure, print."""
    folder, python, codec = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    num_prompts, rounds = int(sys.argv[4]), int(sys.argv[5])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(SAME)
    print(json.dumps(rows(measure(folder, python, codec, num_prompts, rounds), rounds)))


if __name__ == "__main__":
    main()
