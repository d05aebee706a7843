import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from headrace.errors import StreamError
from headrace.stream.sight import Metrics, Sight, prometheus_text, rates, reader_look, server_look

SERVER = {"records": 10.0, "wire_bytes": 5e6, "readers_waited_s": 0.0, "sending_s": 0.0, "active": 1.0}


def test_rates_are_of_the_time_between() -> None:
    found = rates({"records": 10.0}, {"records": 30.0, "new": 4.0}, 2.0)
    assert found == {"records": 30.0, "records/s": 10.0, "new": 4.0, "new/s": 2.0}


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ({}, "nobody"),
        ({"readers_waited_s": 5.0}, "readers for capture"),
        ({"sending_s": 5.0}, "the server for the link and its readers"),
        ({"capture_waited_s": 5.0}, "capture for readers"),
    ],
)
def test_a_server_says_who_waits(more: dict[str, float], waits: str) -> None:
    ring = {"hits": 30.0, "misses": 10.0, "ring_bytes": 25.0, "ring_bound": 100.0, "produced_records": 20.0}
    look = server_look(rates({}, {**SERVER, **ring, **more}, 10.0))
    assert look.values == {
        "produced_s": 2.0, "consumed_s": 1.0, "wire_MB_s": 0.5, "ring_fill": 0.25, "hit_rate": 0.75, "active": 1.0,
        "waits": waits,
    }  # fmt: skip
    assert f"waits {waits}" in look.line


def test_a_reader_says_who_waits() -> None:
    own = {"records": 10.0, "wire_bytes": 5e6, "waited_s": 0.2, "retries": 1.0}
    assert reader_look(rates({}, own, 10.0)).values["waits"] == "the stream for the trainer"
    assert reader_look(rates({}, {**own, "waited_s": 5.0}, 10.0)).values["waits"] == "the trainer for the stream"


def test_looks_are_kept_as_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict(SERVER)
    sight = Sight(lambda: counts, server_look, tmp_path / "deep" / "sight.jsonl")
    assert sight.look_if_due() is None
    counts["records"] = 1000.0
    sight.look()
    monkeypatch.setattr("headrace.stream.sight.EVERY_S", 0.0)
    assert sight.look_if_due() is not None
    first, second = map(json.loads, (tmp_path / "deep" / "sight.jsonl").read_text().splitlines())
    assert first["consumed_s"] > 0
    assert second["consumed_s"] == 0
    assert abs(first["time"] - time.time()) < 60


def test_prometheus_reads_figures_on_loopback_alone() -> None:
    metrics = Metrics(lambda: SERVER, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert text == prometheus_text(SERVER)
    assert "# TYPE headrace_serve_records gauge\nheadrace_serve_records 10.0\n" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/", timeout=5)
    with pytest.raises(StreamError, match="metrics"):
        Metrics(lambda: SERVER, metrics.port)
    silent = socket.create_connection(("127.0.0.1", metrics.port))  # holds up nobody
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5):
        pass
    silent.close()
    metrics.close()
