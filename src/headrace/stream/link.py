"""One server as a reader reaches it: calls that are made again until they succeed, or until there is no sense in it.

In: an address, secrets, requests that may be repeated. Out: messages of answers. A call that hears nothing for
`silence_s` is cut off and made again on a new channel; waits between tries double. The channel is made when it is first
needed, in the process that needs it.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from headrace.errors import StreamError
from headrace.kinds import StreamConfig
from headrace.stream.address import Address
from headrace.stream.memory import reuse_freed
from headrace.stream.messages import SERVICE, Action, only_bytes
from headrace.stream.secrets import read_file, read_private, read_token
from headrace.stream.wire import MAX_ANSWER_BYTES

T = TypeVar("T")
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),  # 16 KiB by default, each frame with its own work
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),  # on their way at once: 1 Gbit/s over 30 ms
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 5.0
REFUSALS = 3  # a refusal may come from damage on the way; so many in a row are meant
MOST_DAMAGED = 20  # answers in a row
_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
}
_HINTS = {
    grpc.StatusCode.UNAUTHENTICATED: "set stream.token_file to a file with the server's token",
    grpc.StatusCode.FAILED_PRECONDITION: "start the server with the run this training began with",
}
_CERTIFICATE_WORDS = ("CERTIFICATE_VERIFY_FAILED", "certificate", "Hostname", "Peer name")


class Unusable(StreamError):
    """This side cannot call; trying again would not help."""


@dataclass(frozen=True)
class Credentials:
    """What a reader shows, and whom it trusts."""

    token: str
    trusted: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @classmethod
    def read(cls, cfg: StreamConfig) -> "Credentials":
        """From the files that settings name. Raises: StreamError."""
        if cfg.token_file is None:
            raise StreamError("a token", "no stream.token_file", "copy the server's token file here and name it")
        return cls(
            read_token(Path(cfg.token_file)),
            None if cfg.certificate is None else read_file(Path(cfg.certificate), "a certificate"),
            None if cfg.client_certificate is None else read_file(Path(cfg.client_certificate), "a certificate"),
            None if cfg.client_key is None else read_private(Path(cfg.client_key), "its key"),
        )


class Link:
    """Calls to one server, from any thread of the process that makes the first."""

    def __init__(self, address: Address, credentials: Credentials, cfg: StreamConfig) -> None:
        if not address.tls and not address.is_loopback:
            hint = "write grpc+tls://; a token must not cross a network that others can read"
            raise StreamError(f"TLS to {address.target}", str(address), hint)
        self.address, self._credentials, self._cfg = address, credentials, cfg
        self._changing = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._process = 0
        self._heard = time.monotonic()
        self._refusals = 0
        self.closed = threading.Event()
        self.num_retries = 0

    def action(self, name: str, read: Callable[[bytes], T]) -> T:
        """What `read` makes of all results of an action, one after the other.

        Args: read: raises StreamError for a damaged answer, which is asked for again. Raises: StreamError as `trouble`.
        """
        request = Action(name).encode()
        self._heard = time.monotonic()
        tries = 0
        while True:
            try:
                return read(b"".join(only_bytes(message) for message in self.attempt("DoAction", request)))
            except (grpc.RpcError, StreamError) as exc:
                tries += 1
                self.trouble(exc, tries)

    def tell(self, name: str, body: bytes, timeout_s: float) -> None:
        """Try an action once, and forget it where the server does not answer: nothing depends on it."""
        with suppress(grpc.RpcError, StreamError):
            for _ in self.attempt("DoAction", Action(name, body).encode(), timeout_s):
                pass

    def attempt(self, method: str, request: bytes, timeout_s: float | None = None) -> Iterator[bytes]:
        """One call; yields its messages as they come. Raises: grpc.RpcError; StreamError for a channel that closed."""
        channel = self._connected()
        token = (("authorization", f"Bearer {self._credentials.token}"),)
        try:
            call = channel.unary_stream(f"/{SERVICE}/{method}")(request, timeout_s, token)
        except ValueError as exc:  # another thread has just dropped this channel
            raise StreamError("an open channel", "one that was closed", "ask again") from exc
        watch = _Watch(call, self._cfg.silence_s)
        try:
            for message in call:
                watch.heard()
                self.note_progress()
                yield message
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # the server is well, and busy
                self._drop(channel)
            raise
        finally:
            watch.stop()
            call.cancel()
        self._refusals = 0

    def note_progress(self) -> None:
        """The server lives."""
        self._heard = time.monotonic()

    def trouble(self, error: grpc.RpcError | StreamError, tries: int) -> None:
        """Wait before a call is made again.

        Args: tries: calls that failed since the last that brought something.
        Raises: StreamError where the server refuses, shows a certificate that is not trusted, or has been silent for
        stream.give_up_s.
        """
        self.num_retries += 1
        told, refused = self._judged(error, tries)
        if refused is not None:
            raise refused
        if time.monotonic() - self._heard > self._cfg.give_up_s:
            hint = "look at the server's log and the link; training goes on from its last checkpoint"
            raise StreamError(f"an answer of {self.address} within {self._cfg.give_up_s:g} s", told, hint)
        doublings = min(tries, 10) if isinstance(error, grpc.RpcError) else 1  # damage does not pass by waiting
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**doublings)
        if self.closed.wait(longest * random.uniform(0.5, 1.0)):
            raise Unusable("a source that is open", "it was closed", "open it again")

    def close(self) -> None:
        """End all calls; safe to call twice."""
        self.closed.set()
        with self._changing:
            channel, self._channel = self._channel, None
        if channel is not None and self._process == os.getpid():
            channel.close()

    def _judged(self, error: grpc.RpcError | StreamError, tries: int) -> tuple[str, StreamError | None]:
        if isinstance(error, Unusable):
            return str(error), error
        if isinstance(error, StreamError):  # a damaged answer
            told = str(error)
            hint = "look at the link, and whether both sides run the same version of headrace"
            final = StreamError("an answer that is whole", f"{told}, {tries} times in a row", hint)
            return told, final if tries >= MOST_DAMAGED else None
        code, details = error.code(), str(error.details())[:500]
        told = f"{code.name}: {details}"
        if code is grpc.StatusCode.UNAVAILABLE and any(word in details for word in _CERTIFICATE_WORDS):
            hint = "set stream.certificate to the server's, or its authority's; and look whether it has expired"
            return told, StreamError(f"a certificate of {self.address} that is trusted", told, hint)
        if code not in _REFUSED:
            self._refusals = 0
            return told, None
        self._refusals += 1
        if self._refusals < REFUSALS:
            return told, None
        hint = _HINTS.get(code, "look at the server's log")
        return told, StreamError(f"an answer of {self.address}", f"a refusal: {details}", hint)

    def _connected(self) -> grpc.Channel:
        with self._changing:
            if self.closed.is_set():
                raise Unusable("a source that is open", "it was closed", "open it again")
            if self._channel is not None and self._process != os.getpid():
                hint = "make the source in the process that reads, or start processes by spawn"
                raise Unusable("a source that was not used before the fork", "one that was", hint)
            if self._channel is None:
                self._process = os.getpid()
                reuse_freed()
                self._channel = self._open()
            return self._channel

    def _open(self) -> grpc.Channel:
        if not self.address.tls:
            return grpc.insecure_channel(self.address.target, options=OPTIONS)
        own = self._credentials
        credentials = grpc.ssl_channel_credentials(own.trusted, own.key, own.certificate)
        return grpc.secure_channel(self.address.target, credentials, options=OPTIONS)

    def _drop(self, channel: grpc.Channel) -> None:
        """Make the next call on a new connection: this one may be dead or out of step."""
        with self._changing:
            if self._channel is channel:
                self._channel = None
        with suppress(ValueError):
            channel.close()


class _Watch:
    """Ends a call that hears nothing for too long."""

    def __init__(self, call: grpc.Call, silence_s: float) -> None:
        self._call, self._silence_s = call, silence_s
        self._last = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="headrace-watch", daemon=True).start()

    def heard(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.05, self._last + self._silence_s - time.monotonic())):
            if time.monotonic() - self._last >= self._silence_s:
                self._call.cancel()
                return
