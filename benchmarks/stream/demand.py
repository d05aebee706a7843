"""A real training run over a link of half its demand: how much of the link it uses, and how long it waits.

In: a folder, the run folder of `make demo`, seconds of each run. Out: rows of claims, as JSON. The demo's prepared set
with raw states of the demo target's shape (noise: what is in them changes no byte count) is served by `headrace serve
--stored` in one namespace and trained on by `headrace train` in another, over TLS: first over a link that does not
matter, which gives the demand, then over half of that. The planner's figures stand beside.

usage: demand.py FOLDER RUN SECONDS
"""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from link import SERVER, shaped

from headrace.codec.spec import CodecSpec
from headrace.files import read_json_lines
from headrace.plan.arithmetic import link_tokens_s
from headrace.prepare.prepared import PreparedSet
from headrace.record import make_record, segment_spans
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.stream.secrets import CERTIFICATE, TOKEN, make_files

NEEDED = 0.9
HEADRACE = [sys.executable, "-c", "from headrace.cli.main import app; app()"]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "demo.yaml")
WIDE_BITS = 10e9
GBIT_BYTES_S = 125e6
BF16_TOKEN_BYTES = 51_200  # Qwen3.6-27B, five taps


def trained(root: Path, run: Path, seconds: float, rate_bits: float) -> dict[str, float]:
    """One run. Returns: tokens a second, the share of time it waited, bytes a second on the link; after its start."""
    shutil.rmtree(root, ignore_errors=True)
    here, there, files = root / "here", root / "there", root / "here" / "serve"
    make_files(files, [SERVER])
    (here / "states").symlink_to(root.resolve().parent / "noise")
    shutil.copytree(run / "prepared", there / "prepared")
    train = {
        "run": there, "floor": "false", "train.max_seconds": 3600, "train.threads": 1, "train.eval_every": 100_000,
        "train.eval_samples": 2, "train.scale_taps": "false",
        "stream.certificate": files / CERTIFICATE, "stream.token_file": files / TOKEN,
        "stream.request_bytes": 1 << 20, "stream.read_ahead_bytes": 4 << 20,
    }  # fmt: skip
    with ExitStack() as stack:
        inside = stack.enter_context(shaped(rate_bits))
        own = [
            *inside[0],
            *HEADRACE,
            "serve",
            EXAMPLE,
            "--stored",
            "--json",
            *_set({"run": here, "serve.address": f"{SERVER}:0"}),
        ]
        server = _started(stack, own)
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        trainer = _started(stack, [*inside[1], *HEADRACE, "train", EXAMPLE, *_set({**train, "source": address})])
        metrics = there / "train" / "metrics.jsonl"
        end = time.monotonic() + 120
        while len(_steps(metrics)) < 3:
            assert time.monotonic() < end, "no step in two minutes"
            assert trainer.poll() is None, "the trainer has ended"
            time.sleep(0.2)
        first, before, began = len(_steps(metrics)), _received(inside[1]), time.monotonic()
        time.sleep(seconds)
        after, took = _received(inside[1]), time.monotonic() - began
        steps = _steps(metrics)[first:]
    return {
        "tokens_s": statistics.median(step["tokens_s"] for step in steps),
        "waiting": statistics.mean(step["data_wait_share"] for step in steps),
        "bytes_s": (after - before) / took,
    }


def make_noise(states: Path, run: Path) -> float:
    """Raw states for every sample of a run. Returns: stored bytes a token."""
    prepared, stored = PreparedSet.open(run / "prepared"), StoreReader(run / "states").manifest
    width = stored.codec.num_taps * stored.codec.hidden_size
    codec = CodecSpec("raw", stored.codec.version, stored.codec.num_taps, stored.codec.hidden_size, "bfloat16")
    if not (states / "index.journal").exists():
        manifest, noise = dataclasses.replace(stored, codec=codec), torch.Generator().manual_seed(0)
        with StoreWriter(states, manifest, shard_bytes=1 << 28, shard_seconds=1e9) as writer:
            for row in range(prepared.num_samples):
                sample = prepared.sample(row)
                spans = segment_spans(sample.num_tokens, 2 * width)
                values = [torch.randn(end - start, width, generator=noise).bfloat16() for start, end in spans]
                payloads = [value.view(torch.uint8).numpy().tobytes() for value in values]
                writer.add(make_record(sample, spans, payloads, writer.generation))
    reader = StoreReader(states)
    return reader.stored_bytes / reader.num_tokens


def _set(values: dict[str, object]) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def _started(stack: ExitStack, command: list[str]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _steps(metrics: Path) -> list[dict[str, Any]]:
    found = read_json_lines(metrics) if metrics.exists() else []
    return [line for line in found if line.get("tokens_s") is not None]


def _received(inside: list[str]) -> int:
    text = subprocess.run([*inside, "cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return next(int(line.split()[1]) for line in text.splitlines() if line.strip().startswith("hr-b:"))


def main(root: Path, run: Path, seconds: float) -> None:
    """Measure all."""
    token_bytes = make_noise(root / "noise", run)
    free = trained(root / "demand", run, seconds, WIDE_BITS)
    demand = free["tokens_s"] * token_bytes
    half = trained(root / "demand", run, seconds, demand * 8 / 2)
    used, planned = half["bytes_s"] / (demand / 2), link_tokens_s(demand / 2, token_bytes).value
    wide = link_tokens_s(GBIT_BYTES_S, BF16_TOKEN_BYTES).value
    name = f"the demo's training over half its demand ({demand / 2e3:.0f} kB/s of {demand / 1e3:.0f})"
    waiting = f"{half['waiting']:.2f} (unshaped {free['waiting']:.2f})"
    tokens = f"{half['tokens_s']:,.0f}; planned {planned:,.0f}; unshaped {free['tokens_s']:,.0f}"
    rows = [
        (name, f"at least {NEEDED} of the link used", f"{used:.2f}", used >= NEEDED),
        (f"{name}: share of time that waits", "reported", waiting, True),
        (f"{name}: tokens/s", "reported", tokens, True),
        ("1 Gbit/s for Qwen3.6-27B's bf16 states, planned", "2,441 tokens/s", f"{wide:,.0f}", round(wide) == 2441),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
