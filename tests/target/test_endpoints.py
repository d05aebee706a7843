import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.errors import TargetError
from headrace.target.channel import DeliveryError, DeliveryRefused, EngineGone
from headrace.target.endpoints import Endpoint, Request, endpoint_folders
from headrace.testing.fake_engine import FakeEngine
from tests.engines import TAPS, fake_endpoint, ids

Open = Callable[..., tuple[FakeEngine, Endpoint]]


@pytest.fixture
def start(folders: dict[str, Path], tmp_path: Path) -> Iterator[Open]:
    """Start a fake engine with a fault; ended with the test."""
    opened = []

    def begin(fault: str = "", **options: object) -> tuple[FakeEngine, Endpoint]:
        context = fake_endpoint(tmp_path / "a", folders["llama"], fault, **options)
        opened.append(context)
        return context.__enter__()

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


def test_states_of_the_ids_come_back_with_the_answer(start: Open) -> None:
    engine, endpoint = start()
    answer = endpoint.ask(Request(ids(20)))
    assert len(answer.output_ids) == 1
    assert answer.delivery is not None
    assert answer.delivery.num_tokens == 20
    assert answer.delivery.num_bytes == 20 * len(TAPS) * 32 * 4
    assert engine.channel.waiting_bytes == 0


def test_answers_and_their_states_come_in_one_request(start: Open) -> None:
    _, endpoint = start()
    answer = endpoint.ask(Request(ids(10), "states", max_tokens=6, output_states=True))
    assert answer.delivery is not None
    assert answer.delivery.num_tokens == 10 + len(answer.output_ids) - 1
    assert answer.finish_reason in ("stop", "length")


def test_prompt_logprobs_are_those_of_each_token(start: Open) -> None:
    _, endpoint = start()
    prompt = ids(9)
    answer = endpoint.ask(Request(prompt, None, prompt_logprobs=1))
    assert answer.delivery is None
    assert answer.prompt_logprobs[0] == {}
    assert all(
        token in row and row[token] < 0 for token, row in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    )


def test_a_long_text_is_refused_before_it_is_sent(start: Open) -> None:
    engine, endpoint = start(max_model_len=30)
    with pytest.raises(DeliveryRefused, match="at most 30 tokens for engine a, found 30 and 1 to generate"):
        endpoint.ask(Request(ids(30)))
    assert engine.num_requests == 0
    assert endpoint.ask(Request(ids(29))).delivery is not None


@pytest.mark.parametrize(
    ("fault", "error", "transient"),
    [
        ("errors_500", "status 500: .*no memory left", True),
        ("queue_full", "the queue is full", True),
        ("hang", "Read timed out", True),
        ("chunk_lost", "rows of 24.*lost: a cached prefix.*or a chunk", False),
        ("wrong_ids", r"ids of 41 tokens \[1, .*a BOS it adds itself", False),
    ],
)
def test_what_fails_says_why_and_whether_to_try_again(start: Open, fault: str, error: str, transient: bool) -> None:
    _, endpoint = start(fault, timeout_s=0.5 if fault == "hang" else 10)
    with pytest.raises(DeliveryError, match=f"(?s){error}") as caught:
        endpoint.ask(Request(ids(40)))
    assert caught.value.transient is transient


def test_a_cached_prefix_that_was_not_captured_is_noticed(start: Open) -> None:
    _, endpoint = start("prefix_dropped")
    endpoint.ask(Request(ids(40)))
    with pytest.raises(DeliveryRefused, match=r"(?s)rows of 8.*--no-enable-prefix-caching"):
        endpoint.ask(Request(ids(40)))
    answer = endpoint.ask(Request(ids(40), prompt_logprobs=1))  # skips the cache
    assert answer.delivery is not None


def test_an_engine_that_has_gone_is_told_apart(start: Open, tmp_path: Path) -> None:
    engine, endpoint = start()
    engine.close()
    with pytest.raises(EngineGone):  # its server, or, where a connection was kept, its channel
        endpoint.ask(Request(ids(4)))
    with pytest.raises(EngineGone):
        endpoint.reopen()
    (tmp_path / "a" / "log").write_text("\n".join(f"line {n}" for n in range(50)))
    assert endpoint.last_lines().splitlines() == [f"line {n}" for n in range(42, 50)]


def test_an_engine_started_again_with_other_columns_is_refused(start: Open, tmp_path: Path) -> None:
    _, endpoint = start()
    path = tmp_path / "a" / "engine.json"
    told = json.loads(path.read_text())
    told["encoded"] = told["encoded"][::-1]
    path.write_text(json.dumps(told))
    with pytest.raises(DeliveryRefused, match="the same encoded"):
        endpoint.reopen()


class Stranger(BaseHTTPRequestHandler):
    """Some other server."""

    content = b"{}"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args: object) -> None:
        pass


PLAIN = b'{"choices": [{"prompt_token_ids": [5], "token_ids": [6]}]%s}'


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{}", "it lacks 'choices'"),
        (b'{"choices": [{"text": "x"}]}', "it lacks 'prompt_token_ids'"),
        (b"<html>", "a JSON answer"),
        (b"[]", "a JSON object"),
        (PLAIN % b"", "headrace's connector, found None"),
        (PLAIN % b', "kv_transfer_params": {"headrace": {"key": "0"}}', "headrace's connector"),
    ],
)
def test_answers_of_another_server_are_refused(start: Open, content: bytes, error: str) -> None:
    _, endpoint = start()
    server = HTTPServer(("127.0.0.1", 0), type("One", (Stranger,), {"content": content}))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    endpoint.file = type(endpoint.file)(**{**endpoint.file.told(), "url": f"http://127.0.0.1:{server.server_port}"})
    with pytest.raises(DeliveryError, match=error):
        endpoint.ask(Request((5,)))
    server.shutdown()
    server.server_close()


def test_a_secret_of_the_environment_is_sent_and_nothing_else(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    _, endpoint = start()
    seen = []
    request = endpoint._http.request

    def spied(method: str, url: str, **given: object) -> object:
        seen.append(given["headers"])
        return request(method, url, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(endpoint._http, "request", spied)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    endpoint.reopen()
    monkeypatch.setenv("VLLM_API_KEY", "word")
    endpoint.reopen()
    assert ["Authorization" in headers for headers in seen] == [False, False, True, True]
    assert seen[-1]["Authorization"] == "Bearer word"


def test_engines_are_found_under_the_run_or_by_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="start one: headrace engine"):
        endpoint_folders([], tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert endpoint_folders([], tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert endpoint_folders(["x"], tmp_path) == [Path("x")]
