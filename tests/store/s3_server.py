"""A real S3 server on loopback: moto's, in a process of its own, with faults that a test asks for.

Run as a program it prints its port. POST /_control with JSON: `fail` [N, code, part of a path]: the next N requests
for such paths get that error; `hold` [seconds, part of path and query]: such requests wait; `meet` [N, part of a
path]: such reads wait until N of them are there. GET /_control: method and path of every request since the last POST.
"""

import io
import json
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>as asked for</Message></Error>'


class Faults:
    """WSGI middleware. Requests run one at a time in moto, whose check and write of a conditional put are two steps."""

    def __init__(self, app: Any) -> None:
        self.app, self.turn = app, threading.Lock()
        self.asked: dict[str, Any] = {}
        self.seen: list[str] = []
        self.meeting: threading.Barrier | None = None

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == "/_control":
            if method == "POST":
                self.asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self.seen = []
                self.meeting = threading.Barrier(self.asked["meet"][0]) if "meet" in self.asked else None
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self.seen).encode()]
        self.seen.append(f"{method} {path}?{environ.get('QUERY_STRING', '')}")
        times, code, part = self.asked.get("fail", [0, "", ""])
        if times > 0 and part in path:
            self.asked["fail"][0] -= 1
            return self._refuse(environ, start, code)
        whole = f"{path}?{environ.get('QUERY_STRING', '')}"
        seconds, part = self.asked.get("hold", [0, "\0"])
        if part in whole:
            time.sleep(seconds)
        if self.meeting and self.asked["meet"][1] in path and method == "GET":
            self.meeting.wait(20)  # a broken barrier drops the connection
        if "CONTENT_LENGTH" in environ:  # a caller that is stopped in the middle of its body holds up nobody else
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0)))
        with self.turn:
            return list(self.app(environ, start))

    def _refuse(self, environ: dict[str, Any], start: Any, code: str) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status = "503 Slow Down" if code == "SlowDown" else "403 Forbidden"
        start(status, [("Content-Type", "application/xml")])
        return [_ERROR.format(code).encode()]


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, Faults(DomainDispatcherApplication(create_backend_app)), threaded=True)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()
