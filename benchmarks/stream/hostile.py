"""Readers that sleep and strangers that knock: what they cost a server, and the good reader beside them.

In: a folder, gigabytes on offer, seconds of sleep, megabytes of a stranger's message. Out: rows of claims, as JSON. A
sample of 500 MB and many of 8 MB; a reader that sleeps; a hundred that ask for the large one and take nothing; half
open connections, and messages without a token.

usage: hostile.py FOLDER GIGABYTES SECONDS MEGABYTES
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
from sides import FILES, STATES, connect, memory_bytes
from turns import SIDES, serving

from headrace.codec.spec import CodecSpec
from headrace.kinds import ServeConfig, StreamConfig
from headrace.record import make_record, segment_spans
from headrace.source import Position
from headrace.store.writer import StoreWriter
from headrace.stream.client import StreamSource
from headrace.stream.messages import SERVICE, encoded
from headrace.stream.secrets import TOKEN, make_files
from headrace.stream.wire import Ticket
from headrace.testing.states import fake_manifest, fake_sample

MIB = 1024 * 1024
SPARE = 128 * MIB
TOKEN_BYTES = 51_200
LARGE, SMALL = 500_000_000, 8_000_000
STALLED, HALF_OPEN = 100, 500
ASKED = 300  # requests whose times are compared

Row = tuple[str, str, str, bool]


def make_store(folder: Path, gigabytes: float) -> None:
    """Row 0 is large, all others are small; kept if it is there."""
    make_files(folder / FILES, [])
    if (folder / STATES / "index.journal").exists():
        return
    sizes = [LARGE] + [SMALL] * int(gigabytes * 1e9 / SMALL)
    manifest, content = fake_manifest(codec=CodecSpec("raw", 0, 1, TOKEN_BYTES // 2, "bfloat16")), bytes(SMALL * 2)
    with StoreWriter(folder / STATES, manifest, shard_bytes=1 << 28, shard_seconds=1e9) as writer:
        for row, size in enumerate(sizes):
            spans = segment_spans(size // TOKEN_BYTES, TOKEN_BYTES)
            payloads = [content[: (end - start) * TOKEN_BYTES] for start, end in spans]
            writer.add(make_record(fake_sample(row, size // TOKEN_BYTES), spans, payloads, writer.generation))


def sleeper(folder: Path, seconds: str) -> list[Row]:
    """One reader that takes a record and sleeps."""
    with serving("serve", str(folder), "127.0.0.1:0", "0") as (port, pid):
        before = memory_bytes("VmRSS", pid)
        command = [sys.executable, SIDES, "sleep", str(folder), f"grpc://127.0.0.1:{port}", seconds, "0"]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        grown = memory_bytes("VmHWM", pid) - before
    bounds = ServeConfig().window_bytes + SPARE, StreamConfig().read_ahead_bytes + SPARE
    what = f"a reader that sleeps {seconds} s: memory of the"
    return [
        _within(f"{what} server", grown, bounds[0]),
        _within(f"{what} reader, which then gets all {told['records']} records", int(told["grown"]), bounds[1]),
        _within(f"{what} reader, with a sample of {LARGE / 1e6:.0f} MB", int(told["with_large"]), bounds[1] + LARGE),
    ]


def stalled(folder: Path) -> list[Row]:
    """Many readers of the large sample that take nothing, and one that reads on."""
    with serving("serve", str(folder), "127.0.0.1:0", "0") as (port, pid), ExitStack() as stack:
        source, known = connect(folder, f"grpc://127.0.0.1:{port}", tls=False)
        stack.callback(source.close)
        few = known[1:11]
        list(source.records(few))
        before, headers = memory_bytes("VmRSS", pid), bearer(folder)
        ticket = encoded({1: Ticket((known[0],), 1 << 30, packed=True).encode()})
        for _ in range(STALLED):
            channel = stack.enter_context(open_channel(port))
            stack.callback(channel.unary_stream(f"/{SERVICE}/DoGet")(ticket, metadata=headers).cancel)
        time.sleep(2.0)
        began = time.monotonic()
        found = sum(1 for _ in source.records([*few, known[0]]))
        seconds = time.monotonic() - began
        grown = memory_bytes("VmHWM", pid) - before
    names = f"{STALLED} readers of a sample of {LARGE / 1e6:.0f} MB that take nothing"
    return [
        _within(f"{names}: memory of the server", grown, ServeConfig().window_bytes + SPARE),
        (f"{names}: 10 records and that sample for another", "they come", f"{found} in {seconds:.1f} s", found == 11),
    ]


def strangers(folder: Path, megabytes: int) -> list[Row]:
    """Half open connections and messages without a token, beside a reader that asks for one record at a time."""
    with serving("serve", str(folder), "127.0.0.1:0", "1") as (port, pid):
        source, known = connect(folder, f"grpc+tls://127.0.0.1:{port}", tls=True)
        asked_ms(source, known)
        idle = asked_ms(source, known)
        before = memory_bytes("VmRSS", pid)
        began = time.monotonic()
        sockets = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(HALF_OPEN)]
        closed: list[float] = []
        waiting = threading.Thread(target=lambda: closed.append(_closed_s(sockets, began)))
        waiting.start()
        beside = asked_ms(source, known)
        waiting.join()
        source.close()
        grown = memory_bytes("VmHWM", pid) - before
    ratio, name = beside / idle, f"{HALF_OPEN} half open connections over TLS"
    times = f"{beside:.1f} ms, idle {idle:.1f}: {ratio:.2f}"
    return [
        (f"{name} are closed", "within 10 s", f"{closed[0]:.1f} s", closed[0] <= 10.0),
        (f"{name}: p99 of another's requests", "at most twice idle", times, ratio <= 2),
        _within(f"{name}: memory of the server", grown, 64 * MIB),
        *_unasked(folder, megabytes),
    ]


def _unasked(folder: Path, megabytes: int) -> list[Row]:
    with serving("serve", str(folder), "127.0.0.1:0", "0") as (port, pid), open_channel(port) as channel:
        before = memory_bytes("VmRSS", pid)
        code = "answered"
        try:
            list(channel.unary_stream(f"/{SERVICE}/DoGet")(bytes(megabytes * 10**6), timeout=120))
        except grpc.RpcError as exc:
            code = exc.code().name
        grown = memory_bytes("VmHWM", pid) - before
    name = f"a message of {megabytes} MB without a token"
    return [
        (name, "refused", code, code in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED")),
        _within(f"{name}: memory of the server", grown, 64 * MIB),
    ]


def asked_ms(source: StreamSource, known: list[Position]) -> float:
    """The 99th percentile of the time of a request for one small record, in milliseconds."""
    times = []
    for k in range(ASKED):
        began = time.monotonic()
        list(source.records([known[1 + k % 8]]))
        times.append(1e3 * (time.monotonic() - began))
    return float(np.percentile(times, 99))


def _closed_s(sockets: list[socket.socket], began: float) -> float:
    for one in sockets:
        one.settimeout(30.0)
        while one.recv(4096):
            pass
        one.close()
    return time.monotonic() - began


@contextmanager
def open_channel(port: str) -> Iterator[grpc.Channel]:
    """A connection of its own, without bounds."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel


def bearer(folder: Path) -> list[tuple[str, str]]:
    """The token as a header."""
    return [("authorization", f"Bearer {(folder / FILES / TOKEN).read_text().strip()}")]


def _within(claim: str, grown: int, bound: int) -> Row:
    return claim, f"at most {bound / MIB:.0f} MiB more", f"{grown / MIB:.0f} MiB", grown <= bound


def main(root: Path, gigabytes: str, seconds: str, megabytes: str) -> None:
    """Measure all."""
    folder = root / f"hostile-{gigabytes}"
    make_store(folder, float(gigabytes))
    print(json.dumps([*sleeper(folder, seconds), *stalled(folder), *strangers(folder, int(megabytes))]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
