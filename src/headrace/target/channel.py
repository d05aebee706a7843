"""The local channel between an engine's process and the capture process: encoded states without a file between them.

In, at the engine: deliveries by key, or the cause of a failure. Out, at the client: the same bytes, each part checked
against its digest before anything reads it. A Unix stream socket of mode 0600; torch-free, for both ends import it.

A frame is a u32 (little-endian) length, a JSON header of that length, then the parts whose lengths and xxh3-128
digests the header lists. A client opens a connection for each request: `hello`, `take` a key, or `drop` it.
"""

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import TargetError
from headrace.record import SEGMENT_BYTES, digest

VERSION = 1
PATH_BYTES = 100  # a Unix socket's path ends at 107 on Linux
_LENGTH = struct.Struct("<I")
_HEADER_BYTES = 1024 * 1024
_PEER_S = 60.0  # a peer that neither reads nor writes for so long is given up
_SWEEP_S = 1.0

Kind = Literal["payload", "states"]


class DeliveryError(TargetError):
    """A request to an engine, or the delivery of its states, failed; the same request may pass later."""

    transient = True


class DeliveryRefused(DeliveryError):
    """A request failed for a cause that will not go away."""

    transient = False


class EngineGone(DeliveryError):
    """Nobody answers at the engine's address."""


class ChannelFull(TargetError):
    """A delivery that would take the channel beyond its bytes; nothing was kept of it."""


def ids_digest(input_ids: Sequence[int] | npt.NDArray[Any]) -> str:
    """xxh3-128 in hex of ids as little-endian int32: which tokens a delivery belongs to."""
    return digest(np.ascontiguousarray(input_ids, dtype="<i4").tobytes()).hex()


@dataclass(frozen=True, eq=False)
class Delivery:
    """States of one request.

    `payload`: `parts` are codec payloads, one for each of `spans` (token ranges [start, end) that cover `num_tokens`).
    `states`: `parts` are raw little-endian bytes in `dtype` of all captured columns, [tokens, columns, hidden], cut
    into `spans`. A part has at most SEGMENT_BYTES. `input_ids_digest` is ids_digest of the tokens the rows belong to.
    """

    kind: Kind
    input_ids_digest: str
    num_tokens: int
    spans: Sequence[tuple[int, int]]
    parts: Sequence[bytes | memoryview] = field(repr=False)
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True)
class _Failure:
    cause: str
    transient: bool
    num_bytes: int = 0


class ChannelServer:
    """The engine's end: holds deliveries until they are taken, dropped, or older than `keep_s`.

    `waiting_bytes` is what waits now; `num_expired` counts what nobody took in time.
    """

    def __init__(self, path: Path, hello: Mapping[str, Any], max_bytes: int, keep_s: float = 120.0) -> None:
        """Listen at `path`, whose folder should be private (0700).

        Args:
            hello: JSON values that a client reads first.
            max_bytes: most bytes that wait; a larger delivery is taken when nothing waits.
        Raises: TargetError for a path that is too long, or where another server listens.
        """
        self.path, self.waiting_bytes, self.num_expired = Path(path), 0, 0
        self._hello = {**hello, "channel": VERSION}
        self._max_bytes, self._keep_s = max_bytes, keep_s
        self._waiting: dict[str, tuple[float, Delivery | _Failure]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._socket = _listen(self.path)
        self._socket.settimeout(_SWEEP_S)
        self._thread = threading.Thread(target=self._accept, name="headrace-channel", daemon=True)
        self._thread.start()

    def put(self, key: str, delivery: Delivery) -> None:
        """Keep a delivery for whoever takes `key`; one of the same key is replaced.

        Raises: ChannelFull when `max_bytes` would be passed. TargetError for parts that do not fit their spans.
        """
        _check_parts(delivery)
        with self._changed:
            self._sweep()
            held = self.waiting_bytes - self._size(key)
            if held and held + delivery.num_bytes > self._max_bytes:
                hint = "the client retries; if it happens often, lower engine.in_flight or raise engine.queue_bytes"
                found = f"{held + delivery.num_bytes:,}"
                raise ChannelFull(f"at most {self._max_bytes:,} bytes of states waiting", found, hint)
            self._keep(key, delivery)

    def fail(self, key: str, cause: str, transient: bool) -> None:
        """Tell whoever takes `key` that it failed, and why."""
        with self._changed:
            self._sweep()
            self._keep(key, _Failure(cause, transient))

    def close(self) -> None:
        """Stop listening, forget what waits, remove the socket; safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()
        self.path.unlink(missing_ok=True)
        self._socket.close()
        self._thread.join(2 * _SWEEP_S)

    def _keep(self, key: str, what: Delivery | _Failure) -> None:
        self.waiting_bytes += what.num_bytes - self._size(key)
        self._waiting[key] = (time.monotonic(), what)
        self._changed.notify_all()

    def _size(self, key: str) -> int:
        return self._waiting[key][1].num_bytes if key in self._waiting else 0

    def _forget(self, key: str) -> None:
        with self._changed:
            self.waiting_bytes -= self._size(key)
            self._waiting.pop(key, None)

    def _sweep(self) -> None:
        oldest = time.monotonic() - self._keep_s
        for key in [key for key, (since, _) in self._waiting.items() if since < oldest]:
            self._forget(key)
            self.num_expired += 1

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                with self._changed:
                    self._sweep()
                continue
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # A peer that has gone, or speaks nonsense, ends its own connection; what it asked for waits on.
        with connection, contextlib.suppress(OSError, DeliveryError):
            connection.settimeout(_PEER_S)
            asked, _ = _receive(connection)
            key = str(asked.get("key"))
            if asked.get("op") == "hello":
                _send(connection, self._hello)
            elif asked.get("op") == "drop":
                self._forget(key)
                _send(connection, {})
            elif asked.get("op") == "take":
                self._give(connection, key, float(asked.get("wait_s", 0)))
            else:
                _send(connection, {"error": f"no such request: {asked.get('op')!r}", "transient": False})

    def _give(self, connection: socket.socket, key: str, wait_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._waiting or self._closed, wait_s)
            since, what = self._waiting.pop(key, (0.0, None))
            self.waiting_bytes -= 0 if what is None else what.num_bytes
        if what is None:
            _send(connection, {"error": f"nothing came for the key {key} in {wait_s:g} s", "transient": True})
            return
        try:
            _send_what(connection, what)
        except OSError:  # the peer went away in the middle: it may ask again
            with self._changed:
                if key not in self._waiting:
                    self._waiting[key] = (since, what)
                    self.waiting_bytes += what.num_bytes
            raise


class ChannelClient:
    """The capture process's end; may be used by many threads at once, and holds nothing open."""

    def __init__(self, path: Path, timeout_s: float = _PEER_S) -> None:
        """Args: timeout_s: seconds without a byte after which the engine counts as gone."""
        self.path, self._timeout_s = Path(path), timeout_s

    def hello(self) -> dict[str, Any]:
        """What the engine says of itself. Raises: EngineGone; DeliveryRefused for another version of the channel."""
        told, _ = self._ask({"op": "hello"}, 0.0)
        if told.get("channel") != VERSION:
            hint = "run the same headrace in the engine's environment and here"
            raise DeliveryRefused(f"version {VERSION} of the channel", str(told.get("channel")), hint)
        return told

    def take(self, key: str, wait_s: float) -> Delivery:
        """The delivery of a key, which the engine then forgets; wait for it up to `wait_s`.

        Raises: EngineGone when nobody answers; DeliveryError (transient) or DeliveryRefused with the engine's cause,
        and DeliveryError for bytes whose digest differs.
        """
        told, parts = self._ask({"op": "take", "key": key, "wait_s": wait_s}, wait_s)
        try:
            spans = [(int(start), int(end)) for start, end in told["spans"]]
            delivery = Delivery(
                told["kind"], str(told["input_ids_digest"]), int(told["num_tokens"]), spans, parts, str(told["dtype"])
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise _nonsense(f"a delivery whose header lacks or garbles {exc}") from exc
        try:
            _check_parts(delivery)
        except TargetError as exc:
            raise DeliveryError(*exc.args) from exc
        return delivery

    def drop(self, key: str) -> None:
        """Tell the engine that nobody will take a key. Raises: EngineGone."""
        self._ask({"op": "drop", "key": key}, 0.0)

    def _ask(self, request: dict[str, Any], wait_s: float) -> tuple[dict[str, Any], list[memoryview]]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s + wait_s)
                connection.connect(str(self.path))
                _send(connection, request)
                told, parts = _receive(connection)
        except OSError as exc:
            hint = "see the engine's log; start it again with headrace engine --launch"
            raise EngineGone(f"an engine that answers at {self.path}", str(exc) or type(exc).__name__, hint) from exc
        if "error" in told:
            kind = DeliveryError if told.get("transient") else DeliveryRefused
            raise kind("states of a request", str(told["error"]), "see the engine's log")
        return told, parts


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > PATH_BYTES:
        raise TargetError(f"a socket's path of at most {PATH_BYTES} bytes", str(path), "choose a shorter folder")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise TargetError(f"nobody listening at {path}", "another engine", "stop it, or name this one")
            path.unlink()  # what a killed engine left
        os.fchmod(listening.fileno(), 0o600)  # before it has a name: it is never there with another mode
        listening.bind(str(path))
        listening.listen(64)
    except OSError as exc:
        listening.close()
        raise TargetError(f"a socket at {path}", exc.strerror or str(exc), "check its folder") from exc
    except TargetError:
        listening.close()
        raise
    return listening


def _check_parts(delivery: Delivery) -> None:
    """Raise TargetError unless spans cover the tokens in order and each has its part."""
    edges = [0, *(end for _, end in delivery.spans)]
    starts = [start for start, _ in delivery.spans]
    if starts != edges[:-1] or edges[-1] != delivery.num_tokens or len(delivery.parts) != len(delivery.spans):
        found = f"{len(delivery.parts)} parts of {list(delivery.spans)[:4]}"
        raise TargetError(f"a part for each span of {delivery.num_tokens} tokens", found, "cut with segment_spans")
    if any(len(part) > SEGMENT_BYTES for part in delivery.parts):
        found = str(max(len(part) for part in delivery.parts))
        raise TargetError(f"parts of at most {SEGMENT_BYTES} bytes", found, "cut with segment_spans")


def _send_what(connection: socket.socket, what: Delivery | _Failure) -> None:
    if isinstance(what, _Failure):
        _send(connection, {"error": what.cause, "transient": what.transient})
        return
    told = {"kind": what.kind, "input_ids_digest": what.input_ids_digest, "num_tokens": what.num_tokens}
    _send(connection, {**told, "spans": list(what.spans), "dtype": what.dtype}, what.parts)


def _send(connection: socket.socket, header: Mapping[str, Any], parts: Sequence[bytes | memoryview] = ()) -> None:
    listed = [[len(part), digest(part).hex()] for part in parts]
    content = json.dumps({**header, "parts": listed}).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)
    for part in parts:
        connection.sendall(part)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[memoryview]]:
    """A frame. Raises: OSError for a peer that has gone; DeliveryError for bytes that are no frame, or are damaged."""
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > _HEADER_BYTES:
        raise _nonsense(f"a header of {size} bytes")
    try:
        header = json.loads(bytes(_exactly(connection, size)))
        listed = [(int(length), bytes.fromhex(expected)) for length, expected in header.pop("parts")]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _nonsense(f"a header that does not read: {exc}") from exc
    if any(not 0 <= length <= SEGMENT_BYTES for length, _ in listed):
        raise _nonsense(f"a part of {max(length for length, _ in listed)} bytes")
    parts = []
    for number, (length, expected) in enumerate(listed):
        part = _exactly(connection, length)
        if digest(part) != expected:
            hint = "the request is made again; if it stays, the engine's memory is at fault"
            raise DeliveryError(f"part {number} with digest {expected.hex()}", digest(part).hex(), hint)
        parts.append(part)
    return header, parts


def _exactly(connection: socket.socket, size: int) -> memoryview:
    content = memoryview(bytearray(size))
    done = 0
    while done < size:
        got = connection.recv_into(content[done:])
        if not got:
            raise ConnectionError("the other end closed in the middle")
        done += got
    return content


def _nonsense(found: str) -> DeliveryError:
    return DeliveryError("a frame of the channel", found, "run the same headrace in the engine's environment and here")
