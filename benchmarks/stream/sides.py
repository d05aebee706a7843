"""The two sides of a link, ours and a bare pyarrow Flight loop, each in a process of its own.

In: a side's name and its arguments. Out: a serving side prints its port and serves until it is killed; a reading side
prints bytes, records and seconds as JSON. Records hold random payloads, tokens x bytes a token; ours lie in a states
folder, theirs in memory, and nobody checks theirs.

usage: sides.py serve FOLDER ADDRESS TLS [mapped] | read FOLDER SOURCE SECONDS TLS
       sides.py relay FOLDER PORT HOST DELAY
       sides.py sleep FOLDER SOURCE SECONDS TLS
       sides.py serve-flight FOLDER TLS | read-flight FOLDER PORT SECONDS TLS
"""

import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from headrace.codec.spec import CodecSpec
from headrace.kinds import ServeConfig, StreamConfig
from headrace.record import SCHEMA, Record, make_record, segment_spans, segment_to_message
from headrace.source import Position
from headrace.store.folder_source import FolderSource
from headrace.store.reader import StoreReader
from headrace.store.shard_files import MappedShards
from headrace.store.writer import StoreWriter
from headrace.stream.client import StreamSource
from headrace.stream.secrets import CERTIFICATE, KEY, TOKEN, make_files
from headrace.stream.server import Secrets, Server
from headrace.stream.supply import FolderSupply
from headrace.testing.relay import Relay
from headrace.testing.states import fake_manifest, fake_sample

STATES, FILES = "states", "files"


def make_states(folder: Path, num_records: int, num_tokens: int, token_bytes: int, names: list[str]) -> None:
    """A store of random payloads and the files of its server; kept if it is there."""
    make_files(folder / FILES, names)
    if (folder / STATES / "index.journal").exists():
        return
    manifest = fake_manifest(codec=CodecSpec("raw", 0, 1, token_bytes // 2, "bfloat16"))
    spans, rng = segment_spans(num_tokens, token_bytes), np.random.default_rng(0)
    with StoreWriter(folder / STATES, manifest, shard_bytes=1 << 28, shard_seconds=1e9) as writer:
        for row in range(num_records):
            payloads = [rng.bytes((end - start) * token_bytes) for start, end in spans]
            writer.add(make_record(fake_sample(row, num_tokens), spans, payloads, writer.generation))


def serve(folder: Path, address: str, tls: bool, mapped: bool = False) -> None:
    """Our server over the store, its shards read or mapped."""
    cfg = ServeConfig(address=address)
    secrets = Secrets.read(cfg, folder / FILES)
    source = FolderSource(StoreReader(folder / STATES, MappedShards(folder / STATES) if mapped else None), 4)
    server = Server(FolderSupply(source), cfg, secrets if tls else Secrets(secrets.token))
    print(server.address.port, flush=True)
    signal.pause()


def read(folder: Path, source: str, seconds: float, tls: bool) -> dict[str, float]:
    """Drain the server for so long, shuffled, over and over; the time counts from the first record."""
    rng = np.random.default_rng(1)
    stream, known = connect(folder, source, tls)
    found, began = {"records": 0, "bytes": 0, "seconds": 0.0}, 0.0
    order = (known[k] for _ in range(10**6) for k in rng.permutation(len(known)))
    for item in stream.records(order):
        now = time.monotonic()
        if not began:
            began = now
            continue
        assert isinstance(item, Record)
        found = {"records": found["records"] + 1, "bytes": found["bytes"] + item.num_bytes, "seconds": now - began}
        if now - began > seconds:
            break
    stream.close()
    return found


def sleep(folder: Path, source: str, seconds: float, tls: bool) -> dict[str, float]:
    """Take one record, sleep, then take all others, row 0 last.

    Returns: records, and bytes by which memory grew, before row 0 and with it.
    """
    stream, (last, *positions) = connect(folder, source, tls)
    stream.manifest()
    before, found = memory_bytes("VmRSS"), 0
    for _ in stream.records(positions):
        if not found:
            time.sleep(seconds)
        found += 1
    grown = memory_bytes("VmHWM") - before
    found += sum(1 for _ in stream.records([last]))
    stream.close()
    return {"records": found, "grown": grown, "with_large": memory_bytes("VmHWM") - before}


def connect(folder: Path, source: str, tls: bool) -> tuple[StreamSource, list[Position]]:
    """A reader, and a position for each record of the store, in the order of rows."""
    files = folder / FILES
    cfg = StreamConfig(token_file=str(files / TOKEN), certificate=str(files / CERTIFICATE) if tls else None)
    reader = StoreReader(folder / STATES)
    known = [Position(0, place, row, reader.id_of(row)) for place, row in enumerate(reader.rows.tolist())]
    reader.close()
    return StreamSource(source, cfg), known


def memory_bytes(name: str, pid: int | str = "self") -> int:
    """VmRSS, what a process holds, or VmHWM, the most it ever held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Bare(flight.FlightServerBase):
    """Sends the store's batches from memory, over and over, to whoever asks."""

    def __init__(self, location: str, batches: list[pa.RecordBatch], **tls: object) -> None:
        super().__init__(location, **tls)
        self._batches = batches

    def do_get(self, _context: object, _ticket: object) -> flight.GeneratorStream:
        return flight.GeneratorStream(SCHEMA, (batch for _ in range(10**6) for batch in self._batches))


def serve_flight(folder: Path, tls: bool) -> None:
    """pyarrow's own server over the same records."""
    reader = StoreReader(folder / STATES)
    batches = []
    for row in reader.rows.tolist():
        for segment in reader.read(row, reader.id_of(row)).segments:
            batches.append(pa.ipc.read_record_batch(pa.py_buffer(bytes(segment_to_message(segment))), SCHEMA))
    files = folder / FILES
    pair = [((files / CERTIFICATE).read_bytes(), (files / KEY).read_bytes())]
    location = f"grpc{'+tls' if tls else ''}://127.0.0.1:0"
    server = Bare(location, batches, **({"tls_certificates": pair} if tls else {}))
    print(server.port, flush=True)
    signal.pause()


def read_flight(folder: Path, port: str, seconds: float, tls: bool) -> dict[str, float]:
    """Drain it with pyarrow's own client."""
    root = (folder / FILES / CERTIFICATE).read_bytes()
    where = f"grpc{'+tls' if tls else ''}://127.0.0.1:{port}"
    client = flight.connect(where, **({"tls_root_certs": root} if tls else {}))
    stream = client.do_get(flight.Ticket(b""))
    stream.read_chunk()
    began = now = time.monotonic()
    records = num_bytes = 0
    while now - began < seconds:
        payload = stream.read_chunk().data.column("payload")
        records, num_bytes, now = records + 1, num_bytes + len(payload[0].as_buffer()), time.monotonic()
    stream.cancel()
    return {"records": records, "bytes": num_bytes, "seconds": now - began}


def main(side: str, folder: Path, *rest: str) -> None:
    """Be one side."""
    tls = rest[-1] == "1"
    match side:
        case "serve":
            serve(folder, rest[0], rest[1] == "1", rest[2:] == ("mapped",))
        case "read":
            print(json.dumps(read(folder, rest[0], float(rest[1]), tls)))
        case "sleep":
            print(json.dumps(sleep(folder, rest[0], float(rest[1]), tls)))
        case "relay":
            print(Relay(int(rest[0]), float(rest[2]), rest[1]).port, flush=True)
            signal.pause()
        case "serve-flight":
            serve_flight(folder, tls)
        case "read-flight":
            print(json.dumps(read_flight(folder, rest[0], float(rest[1]), tls)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
