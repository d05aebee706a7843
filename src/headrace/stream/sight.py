"""What goes on between both sides, in one line: how fast, how full, and who waits for whom.

In: counters and gauges of a server or of a reader. Out: rates since the last look, as a line for people, a line of JSON
in a file, and text that Prometheus reads from a port of loopback.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace.errors import StreamError

EVERY_S = 10.0
WAITS = 0.1  # a share of the time beyond which somebody waits
_MB = 1e6

Figures = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Look:
    """Rates of one stretch of time: `values` by name, and the same as a line."""

    values: Mapping[str, float | str]
    line: str


class Sight:
    """Looks at figures; each look covers the time since the last one. `last` is the newest."""

    def __init__(
        self, figures: Figures, judged: Callable[[Mapping[str, float]], Look], path: Path | None = None
    ) -> None:
        """Args: judged: makes a look of `rates`; path: JSON lines are added to it."""
        self._figures, self._judged, self._path = figures, judged, path
        self._before, self._at = dict(figures()), time.monotonic()
        self.last: Look | None = None

    def look_if_due(self) -> Look | None:
        """A look, if EVERY_S have passed since the last one."""
        return self.look() if time.monotonic() - self._at >= EVERY_S else None

    def look(self) -> Look:
        """What happened since the last look."""
        now, found = time.monotonic(), dict(self._figures())
        self.last = self._judged(rates(self._before, found, now - self._at))
        self._before, self._at = found, now
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **self.last.values}) + "\n")
        return self.last


def rates(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What each figure is now, and as `NAME/s` how fast it rose."""
    rising = {f"{name}/s": (value - before.get(name, 0)) / max(seconds, 1e-9) for name, value in after.items()}
    return {**after, **rising}


def server_look(found: Mapping[str, float]) -> Look:
    """A server's: produced and sent a second, ring, hits, and who waits."""
    asked = found.get("hits/s", 0.0) + found.get("misses/s", 0.0)
    waits = "nobody"
    if found["readers_waited_s/s"] > WAITS:
        waits = "readers for capture"
    elif found["sending_s/s"] > WAITS:
        waits = "the server for the link and its readers"
    elif found.get("capture_waited_s/s", 0.0) > WAITS:
        waits = "capture for readers"
    values: dict[str, float | str] = {
        "produced_s": round(found.get("produced_records/s", 0.0), 2),
        "consumed_s": round(found["records/s"], 2),
        "wire_MB_s": round(found["wire_bytes/s"] / _MB, 3),
        "ring_fill": round(found.get("ring_bytes", 0.0) / max(found.get("ring_bound", 0.0), 1.0), 3),
        "hit_rate": round(found.get("hits/s", 0.0) / asked, 3) if asked else 1.0,
        "active": found["active"],
        "waits": waits,
    }
    return Look(values, _line(values))


def reader_look(found: Mapping[str, float]) -> Look:
    """A reader's: received a second, and who waits."""
    waiting = found["waited_s/s"] > WAITS
    values: dict[str, float | str] = {
        "consumed_s": round(found["records/s"], 2),
        "wire_MB_s": round(found["wire_bytes/s"] / _MB, 3),
        "waited_share": round(found["waited_s/s"], 3),
        "retries": found["retries"],
        "waits": "the trainer for the stream" if waiting else "the stream for the trainer",
    }
    return Look(values, _line(values))


def _line(values: Mapping[str, float | str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items())


def prometheus_text(figures: Mapping[str, float]) -> str:
    """All figures as gauges."""
    names = {name: f"headrace_serve_{name}" for name in sorted(figures)}
    return "".join(f"# TYPE {full} gauge\n{full} {float(figures[name])!r}\n" for name, full in names.items())


class Metrics:
    """Serves `/metrics` on loopback alone; `port` is the one it was given, or found if that is 0."""

    def __init__(self, figures: Figures, port: int) -> None:
        """Raises: StreamError for a port that is taken."""
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(figures))
        except OSError as exc:
            hint = "choose another serve.metrics_port"
            raise StreamError(f"to serve metrics at port {port}", exc.strerror or "an error", hint) from exc
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="headrace-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._server.shutdown()
        self._server.server_close()


def _handler(figures: Figures) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # for whoever connects and says nothing

        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            content = prometheus_text(figures()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    return Handler
