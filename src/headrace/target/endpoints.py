"""One engine's server: requests over HTTP, states over its channel.

In: token ids. Out: an answer whose ids were checked against what was asked, with the states of those ids where they
are wanted; or an error that says whether the same request may pass later. What speaks to many servers: leases.py.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError

from headrace.errors import TargetError
from headrace.target.channel import (
    ChannelClient,
    Delivery,
    DeliveryError,
    DeliveryRefused,
    EngineGone,
    Kind,
    ids_digest,
)
from headrace.target.engine_file import LOG_FILE, EngineFile

_API_KEY = "VLLM_API_KEY"  # what vllm serve reads too; never kept, never told
_PASSING = (408, 429)  # statuses below 500 of a request that may pass later
_CONNECT_S = 5.0
_ABANDON_S = 0.05
_NUM_LINES = 8
_SPARE = 4  # connections of a probe
_LOG_HINT = "see the engine's log"


class TooLong(DeliveryRefused):
    """A text that the server has no positions for; no other try of it can pass."""


@dataclass(frozen=True)
class Request:
    """What is asked of a server about one text.

    `kind`: the form of its states; None: none are wanted. `output_states`: states of prompt + generated - 1 tokens, not
    of the prompt alone. `prompt_logprobs`: so many of each token's; such a request skips the prefix cache.
    """

    prompt: tuple[int, ...]
    kind: Kind | None = "payload"
    max_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    output_states: bool = False
    prompt_logprobs: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the server runs, at most."""
        return len(self.prompt) + self.max_tokens

    def body(self, model: str, key: str) -> dict[str, Any]:
        """The JSON of POST /v1/completions."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "return_token_ids": True,
        }
        if self.temperature > 0:
            body |= {"top_p": self.top_p, "seed": self.seed}
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs
        if self.kind is not None:
            asked = {"key": key, "kind": self.kind}
            body["kv_transfer_params"] = {"headrace": asked, "include_output_tokens": self.output_states}
        return body


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back: generated ids, why they ended, the states if asked, logprobs of each prompt token if asked."""

    output_ids: tuple[int, ...]
    finish_reason: str
    delivery: Delivery | None = None
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)


class Endpoint:
    """One server, as its `engine.json` describes it; may be used by many threads."""

    def __init__(self, folder: Path, timeout_s: float, num_connections: int = 1) -> None:
        """Args: timeout_s: most seconds of a request. Raises: ConfigError for a folder without a sound engine.json."""
        self.folder, self.name, self._timeout_s = folder, folder.name, timeout_s
        self.file = EngineFile.read(folder)
        self.channel = ChannelClient(Path(self.file.channel))
        self.max_model_len: int | None = None
        self.served_from: str | None = None  # the model's folder as the server itself says it
        limits = urllib3.Timeout(connect=_CONNECT_S, read=timeout_s)
        self._http = urllib3.PoolManager(maxsize=num_connections + _SPARE, block=False, retries=False, timeout=limits)

    def reopen(self) -> None:
        """Ask whether the server is there, and read what it says of itself; it may have been started again.

        Raises: EngineGone when it is not there. DeliveryRefused when it serves something else than before.
        """
        found = EngineFile.read(self.folder)
        if changed := self.file.differences(found):
            hint = "one run, one way to capture: start it as the others, or start the run again"
            raise DeliveryRefused(f"engine {self.name} with the same {changed[0]}", "another", hint)
        self.file, self.channel = found, ChannelClient(Path(found.channel))
        self._http.clear()  # a kept connection to a server that was killed would say that the new one is not there
        self._get("/health")
        self.channel.hello()
        listed = self._get("/v1/models").get("data") or [{}]
        self.max_model_len, self.served_from = listed[0].get("max_model_len"), listed[0].get("root")

    def check_length(self, request: Request) -> None:
        """Refuse what the server has no positions for, before it is sent. Raises: TooLong."""
        if self.max_model_len is not None and request.num_tokens > self.max_model_len:
            found = f"{len(request.prompt)} and {request.max_tokens} to generate"
            hint = "lower prepare.max_tokens, or start the engine with a larger --max-model-len"
            raise TooLong(f"at most {self.max_model_len} tokens for engine {self.name}", found, hint)

    def ask(self, request: Request) -> Answer:
        """One request, answered and checked.

        Raises: EngineGone when the server is not there; DeliveryError for what may pass when asked again (status 5xx,
        time-out, full queue, damaged bytes); DeliveryRefused for what will not (too long, other ids, a wrong count).
        """
        self.check_length(request)
        key = uuid.uuid4().hex  # of this attempt alone: a late delivery of an earlier one is nobody's
        body = self._post("/v1/completions", request.body(self.file.model, key))
        try:
            choice = body["choices"][0]
            prompt, output = choice["prompt_token_ids"], tuple(choice["token_ids"])
            told = (body.get("kv_transfer_params") or {}).get("headrace")
            logprobs = _read_logprobs(choice.get("prompt_logprobs")) if request.prompt_logprobs is not None else []
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
            hint = "the server is no vLLM of a version that headrace supports (docs/capture.md)"
            raise DeliveryRefused("an answer with prompt_token_ids and token_ids", f"it lacks {exc}", hint) from exc
        if tuple(prompt or ()) != request.prompt:
            raise DeliveryRefused(
                f"the answer to {len(request.prompt)} ids {list(request.prompt[:4])}...",
                f"ids of {len(prompt or ())} tokens {list(prompt or ())[:4]}...",
                "the engine ran another text: a BOS it adds itself, a cut, or answers that were mixed up",
            )
        delivery = None if request.kind is None else self._take(request, key, told, output)
        return Answer(output, str(choice.get("finish_reason")), delivery, logprobs)

    def abandon(self, request: Request) -> None:
        """Send a request and go away before it is answered, as a client does that is stopped."""
        body = json.dumps(request.body(self.file.model, uuid.uuid4().hex))
        brief = urllib3.Timeout(connect=_CONNECT_S, read=_ABANDON_S)
        with contextlib.suppress(DeliveryError):
            self._call("POST", "/v1/completions", body, brief)

    def last_lines(self) -> str:
        """The end of the engine's log; empty where it has none."""
        try:
            with open(self.folder / LOG_FILE, "rb") as log:
                log.seek(max(0, log.seek(0, 2) - 4096))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_NUM_LINES:])

    def _take(self, request: Request, key: str, told: Any, output: tuple[int, ...]) -> Delivery:
        if not isinstance(told, dict) or told.get("key") != key:
            hint = "start it with headrace engine, whose command names the connector"
            raise DeliveryRefused("kv_transfer_params of headrace's connector", repr(told), hint)
        if "error" in told:
            kind = DeliveryError if told.get("transient") else DeliveryRefused
            raise kind("states of a request", str(told["error"]), _LOG_HINT)
        # It comes after the answer, with the engine's next step, which may wait for a long prefill of others.
        delivery = self.channel.take(key, self._timeout_s)
        ids = (*request.prompt, *output[:-1]) if request.output_states else request.prompt
        if delivery.num_tokens != len(ids):
            raise DeliveryRefused(
                f"states of {len(ids)} tokens", f"rows of {delivery.num_tokens}", _count_cause(delivery, len(ids))
            )
        if delivery.input_ids_digest != ids_digest(ids) or delivery.kind != request.kind:
            hint = "the engine mixes up its requests: report it, and capture with engine.in_flight 1"
            raise DeliveryRefused("states of the ids that were asked", "states of others", hint)
        return delivery

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None, urllib3.Timeout(connect=_CONNECT_S, read=_CONNECT_S))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json.dumps(body), None)

    def _call(self, method: str, path: str, body: str | None, timeout: urllib3.Timeout | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if secret := os.environ.get(_API_KEY):
            headers["Authorization"] = f"Bearer {secret}"
        given: dict[str, Any] = {"body": body, "headers": headers}
        if timeout is not None:
            given["timeout"] = timeout
        try:
            answer = self._http.request(method, self.file.url + path, **given)
            content = answer.data
        except (NewConnectionError, ProtocolError) as exc:
            hint = "start it again: headrace engine --launch"
            how = "nobody listens" if isinstance(exc, NewConnectionError) else f"the connection broke: {exc}"
            raise EngineGone(f"engine {self.name} at {self.file.url}", how, hint) from exc
        except HTTPError as exc:
            hint = "if the engine is only slow, raise engine.timeout_s or lower engine.in_flight"
            raise DeliveryError(f"an answer of engine {self.name}", f"{type(exc).__name__}: {exc}", hint) from exc
        if answer.status == 200:
            return _json_object(content)
        kind = DeliveryError if answer.status >= 500 or answer.status in _PASSING else DeliveryRefused
        found = f"status {answer.status}: {content[:300].decode(errors='replace')}"
        raise kind(f"an answer of engine {self.name}", found, _LOG_HINT)


def endpoint_folders(named: Sequence[str], root: Path) -> list[Path]:
    """Folders of the engines of a run: those named, or all under `root` that hold an engine.json.

    Raises: TargetError where there is none.
    """
    folders = [Path(name) for name in named] or sorted(path.parent for path in root.glob("*/engine.json"))
    if not folders:
        raise TargetError(f"an engine under {root}", "none", "start one: headrace engine RUN.yaml --launch")
    return folders


def _count_cause(delivery: Delivery, wanted: int) -> str:
    if delivery.num_tokens < wanted:
        return (
            "rows were lost: a cached prefix that was not captured (start the engine with --no-enable-prefix-caching), "
            "or a chunk of a long prefill (update the engine)"
        )
    return "rows came twice: the engine captured again what it had preempted; lower engine.in_flight"


def _read_logprobs(listed: Any) -> list[dict[int, float]]:
    """The first token has none."""
    if not listed:
        raise KeyError("prompt_logprobs")
    return [{int(token): float(one["logprob"]) for token, one in (row or {}).items()} for row in listed]


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content or b"{}")
    except ValueError as exc:
        raise DeliveryError("a JSON answer", repr(content[:200]), _LOG_HINT) from exc
    if not isinstance(value, dict):
        raise DeliveryError("a JSON object", repr(content[:200]), _LOG_HINT)
    return value
