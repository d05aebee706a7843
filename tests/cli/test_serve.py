import json
import os
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.record import Record
from headrace.stream.client import StreamSource
from headrace.stream.secrets import CERTIFICATE, KEY, TOKEN
from tests.stream.filling import new_run, tiny_target
from tests.stream.filling import positions as order
from tests.stream.serving import make_store, positions, reader_config


def command(run: Path, *more: str) -> list[str]:
    return ["serve", "--set", f"run={run}", "--set", "serve.address=127.0.0.1:0", *more]


def test_key_certificate_and_token_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, command(tmp_path, "--make-cert", "--name", "capture-1", "--json"))
    assert made.exit_code == 0, made.output
    written = [Path(p) for p in json.loads(made.stdout)["written"]]
    assert {p.name for p in written} == {CERTIFICATE, KEY, TOKEN}
    assert [stat.S_IMODE((tmp_path / "serve" / name).stat().st_mode) for name in (KEY, TOKEN)] == [0o600, 0o600]
    token = (tmp_path / "serve" / TOKEN).read_text()
    again = CliRunner().invoke(app, command(tmp_path, "--make-cert", "--json"))
    assert json.loads(again.stdout) == {"written": []}
    assert (tmp_path / "serve" / TOKEN).read_text() == token


def test_without_a_token_nothing_is_served(tmp_path: Path) -> None:
    make_store(tmp_path / "states")
    done = CliRunner().invoke(app, command(tmp_path, "--stored"))
    assert done.exit_code == 13
    assert "--make-cert" in done.stderr or "a token" in done.stderr


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server process, and what it printed on stdout."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from headrace.cli.main import app; app()", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("stop", "mapped"), [(signal.SIGTERM, "false"), (signal.SIGINT, "true")])
def test_a_store_is_served_until_the_server_is_stopped(tmp_path: Path, stop: signal.Signals, mapped: str) -> None:
    make_store(tmp_path / "states")
    CliRunner().invoke(app, command(tmp_path, "--make-cert"))
    own = command(tmp_path, "--stored", "--set", "serve.metrics_port=0", "--set", f"serve.map_shards={mapped}")
    with serving(*own) as (process, where):
        assert where["address"].startswith("grpc+tls://127.0.0.1:")
        source = StreamSource(where["address"], reader_config(tmp_path / "serve", tls=True))
        assert [item.row for item in source.records(positions(3, 1, 2))] == [3, 1, 2]
        source.close()
        with urllib.request.urlopen(where["metrics"], timeout=10) as answer:
            text = answer.read().decode()
        assert "headrace_serve_records 3.0" in text
        process.send_signal(stop)
        told = "".join(process.communicate(timeout=20))
    assert process.returncode == 0
    assert "stopped" in told
    assert (tmp_path / "serve" / TOKEN).read_text().strip() not in told


@pytest.mark.slow
def test_what_is_not_stored_is_captured_when_it_is_asked_for(tmp_path: Path) -> None:
    cfg, folder = new_run(tiny_target(tmp_path / "tiny"), tmp_path / "run", keep_share=0.0)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    CliRunner().invoke(app, ["serve", str(tmp_path / "run.yaml"), "--make-cert"])
    own = ["serve", str(tmp_path / "run.yaml"), "--set", "serve.address=127.0.0.1:0"]
    with serving(*own) as (process, where):
        source = StreamSource(where["address"], reader_config(folder.root / "serve", tls=True, silence_s=60.0))
        asked = order(cfg, folder, 0)
        found = list(source.records(asked))
        assert [item.row for item in found] == [position.row for position in asked]
        assert all(isinstance(item, Record) for item in found)
        source.close()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)  # ends when the worker has ended too: it holds the same pipes
    assert process.returncode == 0
