"""The serving check against a stand-in for vLLM that decodes with our own code; tests/vllm runs the real server."""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import RunFile, RunFolder
from headrace.drafter.stock import load_stock
from headrace.errors import EvaluateError
from headrace.evaluate import engine
from headrace.evaluate.decode import Decoded, decode
from headrace.evaluate.engine import Served, evaluate_in_engine, summarise
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.run import proposer_of
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.export.zlab import export_zlab
from headrace.progress import Silent
from headrace.target.vllm_command import Installed
from tests.evaluate.conftest import BLOCK, LIMIT, Pair, plain
from tests.evaluate.test_run import made_run

Answer = Callable[[list[int]], tuple[list[int], list[int]]]


class FakeServer:
    """In place of EngineProcess: answers on the port that the command names, with or without its drafter."""

    pair: Pair
    started: list[list[str]]
    spoil: Callable[[list[int], list[int]], tuple[list[int], list[int]]]

    def __init__(self, command: list[str], added: dict[str, str], log: Path, url: str) -> None:
        FakeServer.started.append(command)
        self.drafts, self.accepted = 0, 0
        self._proposer: DrafterProposer | None = None
        if "--speculative_config" in command:
            drafter = load_stock(Path(json.loads(command[command.index("--speculative_config") + 1])["model"]))
            self._proposer = proposer_of(drafter, self.pair.target, self.pair.head)
        self._http = ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), _handler(self))
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def wait_healthy(self, timeout_s: float, told: Callable[[float], None]) -> float:
        told(1.0)
        return 1.0

    def check(self) -> None:
        pass

    def answer(self, prompt: list[int], limit: int, stops: list[int]) -> tuple[list[int], list[int]]:
        if self._proposer is None:
            own: Decoded = plain(self.pair.target, prompt, (), limit)
        else:
            with LiveVerifier(self.pair.target, self._proposer.taps) as live:
                own = decode(live, self._proposer, prompt, limit, stops, Sampling())
        self.drafts += len(own.gained)
        self.accepted += sum(own.gained) - len(own.gained)
        return FakeServer.spoil(own.ids, own.gained) if self._proposer is not None else (own.ids, own.gained)


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            labels = '{engine="0",model_name="target"}'
            self._send(
                f"vllm:spec_decode_num_drafts_total{labels} {server.drafts}.0\n"
                f"vllm:spec_decode_num_accepted_tokens_total{labels} {server.accepted}.0\n".encode()
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids, gained = server.answer(body["prompt"], body["max_tokens"], body["stop_token_ids"])
            events, place = [], 0
            for size in [1, *gained]:
                choice = {"token_ids": ids[place : place + size]}
                if place == 0:
                    choice["prompt_token_ids"] = body["prompt"]
                events.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
                place += size
            self._send("".join([*events, "data: [DONE]\n\n"]).encode())

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@pytest.fixture
def run(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFile, RunFolder]:
    torch.set_num_threads(1)
    FakeServer.pair, FakeServer.started, FakeServer.spoil = pair, [], staticmethod(lambda ids, gained: (ids, gained))
    monkeypatch.setattr(engine, "EngineProcess", FakeServer)
    monkeypatch.setattr(engine, "find_vllm", lambda python: Installed("0.32.0+cpu", "python", Path("/nowhere")))
    cfg, folder = made_run(pair, tmp_path / "run")
    export_zlab(pair.drafter, folder.export)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return cfg.model_copy(update={"engine": cfg.engine.model_copy(update={"port": port})}), folder


def check(run: tuple[RunFile, RunFolder], pair: Pair) -> dict[str, Any]:
    return evaluate_in_engine(*run, pair.target, Silent())


def test_an_engine_that_decodes_alike_has_the_same_counts_and_answers(
    run: tuple[RunFile, RunFolder], pair: Pair
) -> None:
    results = check(run, pair)
    assert results["num_prompts"] == results["num_same_counts"] == results["num_same_as_plain"] == 4
    assert results["tau"] == results["tau_engine"] > 1
    assert results["answers_identical"]
    assert results["plain_identical"]
    assert results["counters"]["drafts"] == results["passes"] == results["passes_engine"]
    drafted, alone = FakeServer.started
    assert json.loads(drafted[drafted.index("--speculative_config") + 1])["num_speculative_tokens"] == BLOCK - 1
    assert "--speculative_config" not in alone
    assert json.loads((run[1].root / "eval-vllm" / "results.json").read_text()) == results


def test_a_check_that_is_done_starts_no_server_again(run: tuple[RunFile, RunFolder], pair: Pair) -> None:
    first = check(run, pair)
    again = check(run, pair)
    assert len(FakeServer.started) == 2
    assert {**again, "counters": None} == {**first, "counters": None}


def test_an_interrupted_check_goes_on_and_a_changed_drafter_begins_anew(
    run: tuple[RunFile, RunFolder], pair: Pair
) -> None:
    check(run, pair)
    path = run[1].root / "eval-vllm" / "drafted.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:9])
    assert check(run, pair)["num_same_counts"] == 4
    assert len(FakeServer.started) == 3
    run[1].export.joinpath("model.safetensors").unlink()
    changed = pair.drafter.state_dict()["fc.weight"].clone()
    try:
        with torch.no_grad():
            pair.drafter.get_parameter("fc.weight").mul_(1.5)
        export_zlab(pair.drafter, run[1].export)
    finally:
        with torch.no_grad():
            pair.drafter.get_parameter("fc.weight").copy_(changed)
    check(run, pair)
    assert len(FakeServer.started) == 5


def test_another_answer_and_other_counts_are_found(run: tuple[RunFile, RunFolder], pair: Pair) -> None:
    FakeServer.spoil = staticmethod(lambda ids, gained: ([*ids[:-1], (ids[-1] + 1) % 60 + 3], gained))
    results = check(run, pair)
    assert not results["answers_identical"]
    assert results["plain_identical"]
    assert results["num_same_counts"] == results["num_other_counts"] == 0


def test_the_same_answer_by_other_passes_is_another_count(run: tuple[RunFile, RunFolder], pair: Pair) -> None:
    FakeServer.spoil = staticmethod(lambda ids, gained: (ids, [1] * sum(gained)))
    results = check(run, pair)
    assert results["answers_identical"]
    assert results["num_other_counts"] > 0
    assert results["tau_engine"] == 1


def test_after_a_tie_counts_are_not_compared() -> None:
    own = {3: {"plain": [5, 6, 7], "gaps": [1.0, 1e-6, 1.0], "ids": [5, 6, 7], "gained": [2], "offered": [3]}}
    found = summarise(own, {3: {"ids": [5, 9, 9], "gained": [1, 1]}}, {3: {"ids": [5, 6, 7]}}, 1e-4)
    assert (found["num_ties"], found["num_same_as_plain"]) == (1, 0)
    assert found["answers_identical"]
    assert found["prompts"][0]["counts"] == "not compared"


def test_a_sampled_evaluation_is_refused(run: tuple[RunFile, RunFolder], pair: Pair) -> None:
    cfg = run[0].model_copy(update={"evaluate": run[0].evaluate.model_copy(update={"temperature": 1.0})})
    with pytest.raises(EvaluateError, match="greedy answers"):
        evaluate_in_engine(cfg, run[1], pair.target, Silent())
    assert not FakeServer.started


def test_a_server_that_refuses_is_an_error(pair: Pair) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.send_response(400)
            self.send_header("Content-Length", "8")
            self.end_headers()
            self.wfile.write(b"too long")

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    with pytest.raises(EvaluateError, match="too long"):
        Served(f"http://127.0.0.1:{http.server_port}", "m", LIMIT, []).answer([1, 2])
    http.shutdown()
    http.server_close()
