import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from headrace.store.reader import StoreReader
from headrace.store.shard_files import FolderShards, MappedShards
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record

MakeStore = Callable[..., Path]
Opens = Callable[[Path], StoreReader]


@pytest.fixture(params=[FolderShards, MappedShards])
def opened(request: pytest.FixtureRequest) -> Opens:
    """Opens a reader of a folder: by positioned reads, and by mappings."""
    return lambda root: StoreReader(root, request.param(root))


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Write a store of rows 0..n-1, two records a shard, every third record in three segments."""

    def make(num_records: int = 6, name: str = "states") -> Path:
        root = tmp_path / name
        with StoreWriter(root, fake_manifest(), shard_bytes=1 << 30, shard_seconds=1e9) as writer:
            for row in range(num_records):
                writer.add(fake_record(row, writer.generation, num_segments=3 if row % 3 == 0 else 1))
                if row % 2:
                    writer.seal()
        return root

    return make


class S3:
    """A server process, the addresses in its one bucket, and the faults it is asked for."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._count = 0

    def ask(self, **faults: Any) -> None:
        """`fail` and `hold`, as tests/store/s3_server.py says; forgets what was seen."""
        self._post("/_control", json.dumps(faults).encode())

    def seen(self, part: str = "") -> list[str]:
        """Requests since the last `ask`, those with `part` in them."""
        with urllib.request.urlopen(self.url + "/_control") as answer:
            return [line for line in json.loads(answer.read()) if part in line]

    def check_credentials(self, yes: bool) -> None:
        self._post("/moto-api/reset-auth", b"0" if yes else b"1000000000")

    def address(self) -> str:
        """An address nobody used yet."""
        self._count += 1
        return f"s3://states/{os.getpid()}-{self._count}/deep"

    def _post(self, path: str, content: bytes) -> None:
        kind = {"Content-Type": "application/octet-stream"}
        urllib.request.urlopen(urllib.request.Request(self.url + path, content, kind, method="POST")).close()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3]:
    program = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    server = S3(int(process.stdout.readline()))
    urllib.request.urlopen(urllib.request.Request(server.url + "/states", method="PUT")).close()
    yield server
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def s3(s3_process: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A real S3 server on loopback, without faults, for this process and its children."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_process.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-of-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    S3FileSystem.clear_instance_cache()  # made with other credentials, or for another server
    s3_process.ask()
    return s3_process
