"""Serve records over Arrow Flight's protocol, with everything that a caller can make grow bounded.

In: a supply, an address, secrets. Out: answers to tickets, as a stock Flight client or headrace's reader wants them;
and a few actions: manifest, holes, basis, commit, figures. Messages, calls, connections that do not speak, pings and
bytes on their way are bounded; whoever is refused or cut off disturbs nobody else.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from headrace.errors import StreamError
from headrace.kinds import ServeConfig
from headrace.record import Record
from headrace.source import Hole
from headrace.store.digested import dump_digested
from headrace.stream.address import parse_address
from headrace.stream.guard import Guard, OtherStates, Unavailable
from headrace.stream.memory import reuse_freed
from headrace.stream.messages import SERVICE, Action, FlightData, encoded, flight_info, only_bytes
from headrace.stream.secrets import CERTIFICATE, KEY, TOKEN, read_file, read_private, read_token
from headrace.stream.sending import ROOM_S, Sending
from headrace.stream.supply import Item, Supply
from headrace.stream.window import Answer, Window
from headrace.stream.wire import (
    MAX_REQUEST_BYTES,
    SCHEMA_HEADER,
    SCHEMA_MESSAGE,
    Ticket,
    decode_commit,
    identity_digest,
)

ANSWER_BYTES = 8 * 1024 * 1024  # of one answer, however many a ticket asks for
_ANSWER_S = 10.0  # then an answer that has nothing yet ends, and the reader asks again
_BEAT_S = 1.0  # between signs of life to a reader that waits
_CHUNK_BYTES = 1024 * 1024  # of a basis

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 32),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_allowed_incoming_connections", 1_024),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.so_reuseport", 0),
)
ACTIONS = {
    "manifest": "identity and provenance of the states, as JSON",
    "holes": "rows without states and why, as JSON",
    "basis": "basis.safetensors of the codec, in parts",
    "commit": "release what a reader will not ask for again",
    "figures": "gauges and counters, as JSON",
}


@dataclass(frozen=True)
class Secrets:
    """What a server shows and asks for; `certificate` and `key` are None without TLS."""

    token: str
    certificate: bytes | None = None
    key: bytes | None = None
    client_ca: bytes | None = None

    @classmethod
    def read(cls, cfg: ServeConfig, folder: Path) -> "Secrets":
        """From the files that settings name, else from those in `folder`. Raises: StreamError."""
        own = folder / CERTIFICATE
        certificate = Path(cfg.certificate) if cfg.certificate else own if own.exists() else None
        key = Path(cfg.key) if cfg.key else folder / KEY
        if cfg.client_ca and certificate is None:
            raise StreamError("a certificate of the server, for serve.client_ca", "none", "set serve.certificate")
        return cls(
            read_token(Path(cfg.token_file) if cfg.token_file else folder / TOKEN),
            None if certificate is None else read_file(certificate, "a certificate"),
            None if certificate is None else read_private(key, "its key"),
            None if cfg.client_ca is None else read_file(Path(cfg.client_ca), "certificates"),
        )

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC."""
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, self.client_ca, require_client_auth=self.client_ca is not None)


@dataclass
class Counts:
    """What a server has sent, and how long it and its readers waited for each other, in seconds of calls."""

    records: int = 0
    wire_bytes: int = 0
    requests: int = 0
    readers_waited_s: float = 0.0  # for a record that was not there yet
    sending_s: float = 0.0  # for readers to take what is there
    active: int = 0


class Server:
    """A server that listens; `address` has the port that was found, where 0 was asked for."""

    def __init__(self, supply: Supply, cfg: ServeConfig, secrets: Secrets, basis: Path | None = None) -> None:
        """Start to listen.

        Args: basis: file of the codec's basis, if it has one.
        Raises: StreamError for an address beyond loopback without TLS, and for one that is taken.
        """
        self.address = parse_address(cfg.address, tls=secrets.certificate is not None)
        if not self.address.tls and not self.address.is_loopback:
            hint = "run `headrace serve --make-cert`, or set serve.certificate and serve.key"
            raise StreamError("a certificate, to listen beyond loopback", f"none, at {self.address}", hint)
        reuse_freed()
        self.counts = Counts()
        self.window = Window(cfg.window_bytes, cfg.stall_s)
        self._service = Service(supply, secrets.token, self.window, self.counts, basis)
        self._server = grpc.server(
            ThreadPoolExecutor(cfg.max_calls, thread_name_prefix="headrace-serve"),
            options=OPTIONS,
            maximum_concurrent_rpcs=cfg.max_calls,
        )
        self._server.add_generic_rpc_handlers((self._service.handlers(),))
        self._stopped = threading.Event()
        try:
            if self.address.tls:
                port = self._server.add_secure_port(self.address.target, secrets.credentials())
            else:
                port = self._server.add_insecure_port(self.address.target)
        except (RuntimeError, ValueError) as exc:
            hint = "choose another port, and check certificate and key"
            raise StreamError(f"to listen at {self.address}", "the address is taken, or not ours", hint) from exc
        self.address = replace(self.address, port=port)
        self._server.start()
        threading.Thread(target=self._watch, name="headrace-stalled", daemon=True).start()

    def figures(self) -> dict[str, float]:
        """Counts of the server and of its supply."""
        return self._service.figures()

    def close(self) -> None:
        """Cut off every call and stop listening; safe to call twice."""
        self._stopped.set()
        self._server.stop(None).wait()

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            self.window.cut_stalled()


class Service:
    """The calls of Flight that headrace answers."""

    def __init__(self, supply: Supply, token: str, window: Window, counts: Counts, basis: Path | None) -> None:
        self._supply, self._token, self._window, self._counts, self._basis = supply, token, window, counts, basis
        self._identity = identity_digest(supply.manifest())
        self._counting = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """For gRPC; messages stay bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "DoGet": grpc.unary_stream_rpc_method_handler(self.do_get),
                "DoAction": grpc.unary_stream_rpc_method_handler(self.do_action),
                "ListActions": grpc.unary_stream_rpc_method_handler(self.list_actions),
                "GetFlightInfo": grpc.unary_unary_rpc_method_handler(self.get_flight_info),
            },
        )

    def get_flight_info(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """For a descriptor whose command is a ticket: where to take it, here."""
        with Guard(context, self._token):
            ticket = Ticket.decode(only_bytes(request, 2))
            return flight_info(SCHEMA_MESSAGE, request, len(ticket.positions))

    def list_actions(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Names and descriptions."""
        with Guard(context, self._token):
            for name, text in ACTIONS.items():
                yield encoded({1: name.encode(), 2: text.encode()})

    def do_action(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Results of one of ACTIONS."""
        with Guard(context, self._token):
            action = Action.decode(request)
            for body in self._results(action):
                yield encoded({1: body})

    def do_get(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The items of a prefix of the ticket's positions."""
        with Guard(context, self._token):
            ticket = Ticket.decode(only_bytes(request))
            if ticket.identity not in (None, self._identity):
                raise OtherStates("a request for the states that are here", "one for others", "compare the manifests")
            if ticket.committed is not None:
                self._supply.commit(ticket.reader, ticket.committed)
            answer = self._window.begin(context.cancel)
            self._count(requests=1, active=1)
            try:
                yield from self._answer(ticket, answer)
            finally:
                answer.end()
                self._count(active=-1)

    def _answer(self, ticket: Ticket, answer: Answer) -> Iterator[bytes]:
        if not ticket.packed:
            yield FlightData(SCHEMA_HEADER).encode()
        began = time.monotonic()
        while not (items := self._take(ticket, answer)) and time.monotonic() - began < _ANSWER_S:
            yield b""  # a sign of life
        num_records = sum(not isinstance(item, Hole) for item in items)
        self._count(readers_waited_s=time.monotonic() - began, records=num_records)
        sending = Sending(answer, ticket.positions, self._supply.damaged, ticket.packed)
        for message in sending.messages(items):
            self._count(wire_bytes=len(message))
            sent = time.monotonic()
            yield message
            self._count(sending_s=time.monotonic() - sent)

    def _take(self, ticket: Ticket, answer: Answer) -> list[Item]:
        """What is there now, with room for what of it is in memory; nothing where it is not there yet."""
        most = min(ticket.max_bytes, ANSWER_BYTES)
        if not answer.grow(most, ROOM_S):
            raise Unavailable("room for an answer", "too many answers on their way", "ask again")
        items = self._supply.take(ticket.positions, most, _BEAT_S)
        # A record that is larger is the supply's own, and shared by all answers.
        held = sum(item.num_bytes for item in items if isinstance(item, Record))
        answer.sent(max(0, most - held))
        return items

    def _results(self, action: Action) -> Iterator[bytes]:
        match action.type:
            case "manifest":
                yield dump_digested(self._supply.manifest()).encode()
            case "holes":
                held = self._supply.holes().values()
                yield dump_digested({"holes": [[h.row, h.id.hex(), h.reason] for h in held]}).encode()
            case "basis" if "basis" in self._supply.manifest()["identity"]["codec"]["parameters"]:
                yield from _chunks(self._basis)
            case "commit":
                self._supply.commit(*decode_commit(action.body))
                yield b"{}"
            case "figures":
                yield json.dumps(self.figures()).encode()
            case _:
                raise StreamError(f"an action among {', '.join(ACTIONS)}", "another", "see docs/streaming.md")

    def figures(self) -> dict[str, float]:
        """Counts of the server and of its supply."""
        own: dict[str, Any] = {**vars(self._counts), "cut_off": self._window.num_cut}
        return {**self._supply.figures(), **own, "window_bytes": self._window.num_bytes}

    def _count(self, **more: float) -> None:
        with self._counting:
            for name, value in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + value)


def _chunks(path: Path | None) -> Iterator[bytes]:
    if path is None or not path.is_file():  # the capture writes it when it begins
        raise Unavailable("a basis", "none yet", "ask again")
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
