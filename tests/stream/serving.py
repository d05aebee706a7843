"""A store, a server over it in this process or in one of its own, and a reader of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.kinds import ServeConfig, StreamConfig
from headrace.source import Position
from headrace.store.folder_source import FolderSource
from headrace.store.verify import BASIS_NAME
from headrace.store.writer import StoreWriter
from headrace.stream.client import StreamSource
from headrace.stream.secrets import CERTIFICATE, TOKEN, make_files
from headrace.stream.server import Secrets, Server
from headrace.stream.supply import FolderSupply
from headrace.testing.states import fake_manifest, fake_record, fake_sample

HOLE = 5


def make_store(root: Path, num_records: int = 24, num_tokens: int = 12, **identity: Any) -> Path:
    """Records of one segment, every third of three; row HOLE failed for good."""
    with StoreWriter(root, fake_manifest(**identity), shard_bytes=1 << 30, shard_seconds=1e9) as writer:
        for row in range(num_records):
            if row == HOLE:
                writer.fail(fake_sample(row, num_tokens).id, row, "states are not finite", permanent=True)
            else:
                writer.add(fake_record(row, writer.generation, 3 if row % 3 == 0 else 1, num_tokens))
    return root


def positions(*rows: int, num_tokens: int = 12) -> list[Position]:
    return [Position(0, place, row, fake_sample(row, num_tokens).id) for place, row in enumerate(rows)]


@contextmanager
def served(states: Path, folder: Path, tls: bool = False, **settings: Any) -> Iterator[Server]:
    """A server in this process, at a port of its own, with files of its own in `folder`."""
    make_files(folder, [])
    cfg = ServeConfig(**{"address": "127.0.0.1:0", **settings})
    secrets = Secrets.read(cfg, folder)
    if not tls:
        secrets = Secrets(secrets.token)
    supply = FolderSupply(FolderSource(states, 2))
    server = Server(supply, cfg, secrets, states / BASIS_NAME)
    try:
        yield server
    finally:
        server.close()
        supply.close()


def reader_config(folder: Path, tls: bool = False, **settings: Any) -> StreamConfig:
    trusted = {"certificate": str(folder / CERTIFICATE)} if tls else {}
    own = {"token_file": str(folder / TOKEN), "give_up_s": 20.0, "silence_s": 5.0}
    return StreamConfig(**{**own, **trusted, **settings})


def reader(server: Server, folder: Path, tls: bool = False, **settings: Any) -> StreamSource:
    scheme = "grpc+tls" if tls else "grpc"
    return StreamSource(f"{scheme}://127.0.0.1:{server.address.port}", reader_config(folder, tls, **settings))


class ServerProcess:
    """A server in a process of its own, at one port over every restart."""

    def __init__(self, states: Path, folder: Path, port: int = 0, tls: bool = False, **settings: Any) -> None:
        make_files(folder, [])
        own = [str(states), str(folder), str(int(tls)), json.dumps(settings)]
        self._command = [sys.executable, "-m", "tests.stream.serving", *own]
        self.port = port
        self.start()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """At the port it had before, if it had one."""
        self.process = subprocess.Popen([*self._command, str(self.port)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """As a machine that dies: no goodbye."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    @property
    def resident_bytes(self) -> int:
        """Memory it holds, and the most it ever held."""
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(field))


if __name__ == "__main__":
    states, folder, tls, settings, port = sys.argv[1:]
    settings = {"address": f"127.0.0.1:{port}", **json.loads(settings)}
    with served(Path(states), Path(folder), tls == "1", **settings) as server:
        sys.stdout.write(f"{server.address.port}\n")
        sys.stdout.flush()
        signal.pause()
