import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import TargetError
from headrace.target.vllm_process import EngineProcess, is_healthy

# Answers /health after a moment, with a child of its own that would outlive it.
SERVER = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(0.3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def started(tmp_path: Path, code: str) -> EngineProcess:
    port = free_port()
    return EngineProcess([sys.executable, "-c", code, str(port)], {}, tmp_path / "log", f"http://127.0.0.1:{port}")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]


def child_of(server: EngineProcess) -> int:
    return int(server.log.read_text().split()[1])


def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_server_is_waited_for_and_stopped_with_what_it_started(tmp_path: Path) -> None:
    told: list[float] = []
    with started(tmp_path, SERVER) as server:
        assert 0 < server.wait_healthy(60, told.append) < 60
        assert told
        assert is_healthy(server.url)
        worker = child_of(server)
        assert alive(worker)
    assert not is_healthy(server.url)
    assert gone(worker)


def test_a_child_that_dies_shows_its_exit_code_and_last_lines_at_once(tmp_path: Path) -> None:
    code = "import sys, time; time.sleep(0.2); print('no such model', flush=True); sys.exit(3)"
    begun = time.monotonic()
    with started(tmp_path, code) as server, pytest.raises(TargetError, match="exit code 3") as found:
        server.wait_healthy(600)
    assert time.monotonic() - begun < 30
    assert "no such model" in str(found.value)


def test_a_killed_server_is_noticed_and_its_workers_go_too(tmp_path: Path) -> None:
    with started(tmp_path, SERVER) as server:
        server.wait_healthy(60)
        worker = child_of(server)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(TargetError, match="signal 9"):
            server.watch()
        assert gone(worker)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with (
        started(tmp_path, "import time; time.sleep(600)") as server,
        pytest.raises(TargetError, match="within 1 s, found its log is empty"),
    ):
        server.wait_healthy(1)


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="to start"):
        EngineProcess([str(tmp_path / "none")], {}, tmp_path / "log", "http://127.0.0.1:1")


# As a server that is asked to end, and takes its worker along; or that hears nothing.
GRACEFUL = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def end(*_):
    child.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("child", child.pid, flush=True)
signal.pause()
"""
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
WATCHER = """
import sys, time
from pathlib import Path
from headrace.target import vllm_process
vllm_process.STOP_S = 1.0
command = [sys.executable, "-c", sys.argv[3]]
server = vllm_process.EngineProcess(command, {}, Path(sys.argv[1]), f"http://127.0.0.1:{sys.argv[2]}")
while not Path(sys.argv[1]).read_text():
    time.sleep(0.05)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", [False, True], ids=["alone", "with the server"])
@pytest.mark.parametrize("code", [GRACEFUL, DEAF, SERVER], ids=["graceful", "deaf", "plain"])
def test_a_server_and_its_workers_end_when_whoever_watches_it_is_killed(
    tmp_path: Path, code: str, killed: bool
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", WATCHER, str(log), str(free_port()), code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        server = int(child.stdout.readline())
        worker = int(log.read_text().split()[1])
        assert alive(server)
        assert alive(worker)
        if killed:
            os.kill(server, signal.SIGKILL)
        child.kill()
    assert gone(server)
    assert gone(worker)
