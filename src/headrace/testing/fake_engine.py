"""An engine for tests: the HTTP and the channel of a vLLM server with our connector, over a tiny target.

In: a model folder, taps, a codec, and the name of a fault. Out: a server on loopback that answers right, or commits
that fault; `engine.json` in its folder once it listens. Run as a process (`python -m headrace.testing.fake_engine`), so
that a test can kill it; a fault may also be set later, by POST /fault.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from headrace.codec.base import TORCH_DTYPES, RawCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import TargetConfig
from headrace.errors import CodecError
from headrace.record import segment_spans
from headrace.taps import FINAL_POST_NORM, FINAL_PRE_NORM, Tap, from_vllm, parse_taps, to_vllm
from headrace.target.channel import ChannelFull, ChannelServer, Delivery, ids_digest
from headrace.target.engine_file import EngineFile
from headrace.target.transformers_target import TransformersTarget, load_target

CHUNK = 16  # tokens of a prefill chunk, and of a block of the prefix cache
FOREVER = 10**9
_SLOW_S = 0.5

# What spoils the states [T, C, H] of a request that was computed right.
_SPOIL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "out_of_order": lambda s: torch.cat([s[CHUNK : 2 * CHUNK], s[:CHUNK], s[2 * CHUNK :]]),
    "chunk_lost": lambda s: torch.cat([s[:CHUNK], s[2 * CHUNK :]]),
    "zero_rows": lambda s: s * (torch.arange(len(s)) % 3 != 1)[:, None, None],
    "nan": lambda s: torch.where((torch.arange(len(s)) == len(s) // 2)[:, None, None], math.nan, s),
    "duplicate_rows": lambda s: torch.cat([s[:CHUNK], s[CHUNK - 4 : CHUNK], s[CHUNK:]])[: len(s)],
    "unsorted_taps": lambda s: torch.cat([s[:, :-1].flip(1), s[:, -1:]], dim=1),
}
STATE_FAULTS = (*_SPOIL, "prefix_dropped", "off_by_one", "normed_final", "other_tokens", "wrong_ids")
SERVER_FAULTS = ("slow", "errors_500", "hang", "death", "queue_full")


class FakeEngine:
    """A server in this process, from construction until `close`; `fault` is committed `times` times from now on."""

    def __init__(
        self, folder: Path, model: str, taps: Sequence[str], codec: CodecSpec, *, basis: Path | None = None,
        dtype: str = "float32", fault: str = "", times: int = FOREVER, port: int = 0, max_model_len: int = 512,
        queue_bytes: int = 2**26, engine: str = "fake", version: str = "0",
    ) -> None:  # fmt: skip
        self.target: TransformersTarget = load_target(TargetConfig.model_validate({"model": model, "dtype": dtype}))
        self.target.model.requires_grad_(False)
        self.fault, self.times, self.max_model_len = fault, times, max_model_len
        depth = self.target.spec.num_blocks
        run_taps = parse_taps(taps, depth)
        self.columns = sorted({*run_taps, FINAL_PRE_NORM}, key=lambda tap: to_vllm(tap, depth))
        self.encoded = [self.columns.index(tap) for tap in run_taps]
        self.codec = open_codec(codec, basis)
        self.num_requests = 0
        self._seen_blocks: set[bytes] = set()
        self._turn, self._closing = threading.Lock(), threading.Event()
        self._sockets = Path(tempfile.mkdtemp(prefix="headrace-"))  # made with mode 0700
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.file = EngineFile(
            url=f"http://127.0.0.1:{self._server.server_port}", channel=str(self._sockets / "s"), model="fake",
            model_folder=str(self.target.folder), taps=[str(tap) for tap in self.columns],
            layer_ids=[to_vllm(tap, depth) for tap in self.columns], num_states=len(self.columns),
            hidden_size=self.target.spec.hidden_size, encoded=self.encoded, codec=codec.to_json(),
            basis=None if basis is None else str(basis), queue_bytes=queue_bytes, engine=engine, version=version,
            dtype=self.target.spec.dtype,
        )  # fmt: skip
        self.channel = ChannelServer(Path(self.file.channel), self.file.told(), queue_bytes)
        self.file.write(folder)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self.channel.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def committed(self, *names: str) -> str:
        """The fault to commit now, counted, if it is among these; else an empty text."""
        with self._turn:
            if self.fault not in names or not self.times:
                return ""
            self.times -= 1
            return self.fault

    def completion(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer one request: status and body. States go to the channel."""
        self.num_requests += 1
        trouble = self.committed(*SERVER_FAULTS)
        if trouble == "death":
            os._exit(3)
        if trouble in ("hang", "slow"):
            self._closing.wait(FOREVER if trouble == "hang" else _SLOW_S)
        if trouble == "errors_500":
            return 500, {"error": {"message": "the engine core has no memory left"}}
        prompt = [int(token) for token in asked["prompt"]]
        if len(prompt) + asked["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"{len(prompt)} tokens are more than {self.max_model_len}"}}
        with self._turn:
            answer = self._generated(prompt, asked)
        prompt_ids = [1, *prompt] if self.committed("wrong_ids") else prompt
        choice: dict[str, Any] = {"prompt_token_ids": prompt_ids, "token_ids": answer, "finish_reason": "length"}
        if len(answer) < asked["max_tokens"] or answer[-1] in self.target.stop_ids:
            choice["finish_reason"] = "stop"
        if asked.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, asked["prompt_logprobs"])
        told = {}
        wanted = (asked.get("kv_transfer_params") or {}).get("headrace")
        if wanted is not None:
            rows = prompt + answer[:-1] if asked["kv_transfer_params"].get("include_output_tokens") else prompt
            told = {"headrace": self._deliver(wanted, rows, trouble, fresh=asked.get("prompt_logprobs") is not None)}
        return 200, {"choices": [choice], "kv_transfer_params": told}

    @torch.inference_mode()
    def _generated(self, prompt: list[int], asked: dict[str, Any]) -> list[int]:
        if asked["max_tokens"] == 1:
            return [int(self.target.model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())]
        found = self.target.generate(
            [prompt],
            asked["max_tokens"],
            asked.get("temperature", 0.0),
            asked.get("top_p", 1.0),
            asked.get("seed") or 0,
        )
        return list(found[0].ids)

    def _deliver(self, wanted: dict[str, Any], ids: list[int], trouble: str, fresh: bool) -> dict[str, Any]:
        key = wanted["key"]
        try:
            if trouble == "queue_full":
                raise ChannelFull("room in the queue", "none: the queue is full", "ask again")
            with self._turn:
                states = self._spoilt(ids, fresh)
            if wanted["kind"] == "payload":
                codec = self.codec
                states = states[:, self.encoded].to(TORCH_DTYPES[codec.spec.dtype])
            else:
                codec = RawCodec(CodecSpec("raw", 0, len(self.columns), states.shape[-1], self.target.spec.dtype))
            spans: list[tuple[int, int]] = segment_spans(len(states), codec.spec.bytes_per_token())
            parts = [codec.encode(states[start:end]) for start, end in spans]
            told = Delivery(wanted["kind"], ids_digest(ids), len(states), spans, parts, codec.spec.dtype)
            self.channel.put(key, told)
        except (ChannelFull, CodecError) as exc:
            transient = isinstance(exc, ChannelFull)
            self.channel.fail(key, str(exc.args[1]), transient)
            return {"key": key, "error": str(exc.args[1]), "transient": transient}
        return {"key": key, "num_tokens": len(states)}

    def _spoilt(self, ids: list[int], fresh: bool) -> torch.Tensor:
        """States [T, C, H] of ids in the columns' order, as the fault leaves them."""
        fault = self.fault if self.fault in STATE_FAULTS and self.times else ""
        taps = self.columns
        if fault == "off_by_one":
            depth = self.target.spec.num_blocks
            taps = [from_vllm(max(0, to_vllm(tap, depth) - 1), depth) for tap in taps]
        elif fault == "normed_final":
            taps = [FINAL_POST_NORM if tap == FINAL_PRE_NORM else tap for tap in taps]
        states = self._states(ids[::-1] if fault == "other_tokens" else ids, taps)
        if fault in _SPOIL and (len(states) > CHUNK or fault in ("zero_rows", "nan", "unsorted_taps")):
            states = _SPOIL[fault](states)
        cached = self._cached(ids)
        if fault == "prefix_dropped" and not fresh:
            states = states[cached:]
        return states

    def _states(self, ids: list[int], taps: Sequence[Tap]) -> torch.Tensor:
        unique = list(dict.fromkeys(taps))  # shifted ones may fall together
        (states,) = self.target.states([np.array(ids, dtype=np.int32)], unique, len(ids))
        return states[:, [unique.index(tap) for tap in taps]]

    def _cached(self, ids: list[int]) -> int:
        """Tokens of whole blocks that an earlier request began with, the last token never among them."""
        starts = range(CHUNK, len(ids), CHUNK)
        blocks = [np.array(ids[:end], dtype=np.int32).tobytes() for end in starts]
        cached = sum(block in self._seen_blocks for block in blocks) * CHUNK
        self._seen_blocks.update(blocks)
        return cached

    @torch.inference_mode()
    def _prompt_logprobs(self, prompt: list[int], count: int) -> list[dict[str, Any] | None]:
        with self._turn:
            logits = self.target.model(input_ids=torch.tensor([prompt])).logits[0].float()
        logprobs = logits.log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for row, token in zip(logprobs[:-1], prompt[1:], strict=True):
            tokens = {*row.topk(count).indices.tolist(), token}
            found.append({str(k): {"logprob": float(row[k]), "rank": int((row > row[k]).sum()) + 1} for k in tokens})
        return found


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(200, {"data": [{"id": "fake", "max_model_len": engine.max_model_len}]})
            else:
                self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/fault":
                engine.fault, engine.times = asked["name"], asked.get("times", FOREVER)
                self._answer(200, {})
            else:
                self._answer(*engine.completion(asked))

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:  # the client has given up
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def main() -> None:
    """Serve until killed; the codec is given as the JSON of its spec."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "model", "taps", "codec"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--basis", type=Path)
    parser.add_argument("--times", type=int, default=FOREVER)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    FakeEngine(
        Path(given.folder), given.model, given.taps.split(","), CodecSpec.from_json(json.loads(given.codec)),
        basis=given.basis, dtype=given.dtype, fault=given.fault, times=given.times, port=given.port,
    )  # fmt: skip
    threading.Event().wait()


if __name__ == "__main__":
    main()
