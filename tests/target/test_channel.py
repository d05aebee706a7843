import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import TargetError
from headrace.record import SEGMENT_BYTES, digest
from headrace.target.channel import (
    ChannelClient,
    ChannelFull,
    ChannelServer,
    Delivery,
    DeliveryError,
    DeliveryRefused,
    EngineGone,
    ids_digest,
)

KEY, OTHER = "0" * 32, "1" * 32


def delivery(*parts: bytes) -> Delivery:
    spans = [(3 * k, 3 * k + 3) for k in range(len(parts))]
    return Delivery("payload", ids_digest(range(3 * len(parts))), 3 * len(parts), spans, parts, "bfloat16")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChannelServer]:
    server = ChannelServer(tmp_path / "s", {"engine": "fake"}, max_bytes=1000, keep_s=120)
    yield server
    server.close()


@pytest.fixture
def client(server: ChannelServer) -> ChannelClient:
    return ChannelClient(server.path, timeout_s=5)


def test_a_delivery_arrives_whole_and_is_forgotten(server: ChannelServer, client: ChannelClient) -> None:
    sent = delivery(b"abc", b"defg")
    server.put(KEY, sent)
    assert server.waiting_bytes == 7
    got = client.take(KEY, 0)
    assert (got.kind, got.num_tokens, got.spans, got.dtype) == ("payload", 6, [(0, 3), (3, 6)], "bfloat16")
    assert got.input_ids_digest == sent.input_ids_digest
    assert [bytes(part) for part in got.parts] == [b"abc", b"defg"]
    with pytest.raises(DeliveryError, match=r"nothing came for the key 0+ in 0 s"):
        client.take(KEY, 0)
    assert server.waiting_bytes == 0


def test_the_digest_of_ids_is_that_of_int32(client: ChannelClient) -> None:
    assert ids_digest([1, 2, 70000]) == ids_digest(np.array([1, 2, 70000], dtype=np.int64))
    assert ids_digest([1]) == digest(b"\1\0\0\0").hex() != ids_digest([1, 1])


def test_taking_waits_for_what_comes_later(server: ChannelServer, client: ChannelClient) -> None:
    threading.Timer(0.2, server.put, (KEY, delivery(b"late"))).start()
    assert bytes(client.take(KEY, 5).parts[0]) == b"late"


def test_many_threads_take_large_parts_of_their_own(tmp_path: Path) -> None:
    server = ChannelServer(tmp_path / "s", {}, max_bytes=10**9)
    parts = {f"{k:032x}": bytes([k]) * (SEGMENT_BYTES if k == 0 else 300_000) for k in range(16)}
    client, got = ChannelClient(server.path), {}
    threads = [
        threading.Thread(target=lambda key=key: got.update({key: bytes(client.take(key, 10).parts[0])}))
        for key in parts
    ]
    for thread in threads:
        thread.start()
    for key, part in parts.items():
        server.put(key, delivery(part))
    for thread in threads:
        thread.join()
    assert got == parts
    assert server.waiting_bytes == 0
    server.close()


def test_the_socket_is_the_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        server = ChannelServer(tmp_path / "s", {}, 10)
    finally:
        os.umask(old)
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not server.path.exists()
    with pytest.raises(EngineGone, match="an engine that answers at"):
        ChannelClient(server.path).hello()


def test_hello_tells_what_the_engine_said_and_the_version(server: ChannelServer, client: ChannelClient) -> None:
    assert client.hello()["engine"] == "fake"
    server._hello["channel"] = 2
    with pytest.raises(DeliveryRefused, match="version 1 of the channel, found 2"):
        client.hello()


def test_bytes_that_wait_are_bounded(server: ChannelServer, client: ChannelClient) -> None:
    server.put(KEY, delivery(b"x" * 600))
    with pytest.raises(ChannelFull, match="at most 1,000 bytes of states waiting, found 1,100"):
        server.put(OTHER, delivery(b"y" * 500))
    server.put(KEY, delivery(b"z" * 900))  # the same key is replaced, not added
    assert server.waiting_bytes == 900
    client.drop(KEY)
    assert server.waiting_bytes == 0
    server.put(OTHER, delivery(b"y" * 5000))  # larger than the bound, but alone
    assert len(client.take(OTHER, 0).parts[0]) == 5000


def test_causes_of_failures_reach_the_client(server: ChannelServer, client: ChannelClient) -> None:
    server.fail(KEY, "the queue is full", transient=True)
    server.fail(OTHER, "NaN at token 4", transient=False)
    with pytest.raises(DeliveryError, match="the queue is full") as caught:
        client.take(KEY, 0)
    assert caught.value.transient
    with pytest.raises(DeliveryRefused, match="NaN at token 4") as caught:
        client.take(OTHER, 0)
    assert not caught.value.transient


def test_what_nobody_takes_is_dropped_and_counted(tmp_path: Path) -> None:
    server = ChannelServer(tmp_path / "s", {}, 1000, keep_s=0.1)
    server.put(KEY, delivery(b"abc"))
    for _ in range(100):
        if server.num_expired:
            break
        time.sleep(0.05)
    assert (server.num_expired, server.waiting_bytes) == (1, 0)
    server.close()


def test_a_killed_engines_socket_is_replaced_and_a_live_ones_is_not(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()  # the name stays, nobody listens
    server = ChannelServer(tmp_path / "s", {}, 10)
    with pytest.raises(TargetError, match="another engine"):
        ChannelServer(tmp_path / "s", {}, 10)
    assert ChannelClient(server.path).hello()["channel"] == 1
    server.close()


def test_a_long_path_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="at most 100 bytes"):
        ChannelServer(tmp_path / ("x" * 120), {}, 10)
    with pytest.raises(TargetError, match="a socket at"):
        ChannelServer(tmp_path / "absent" / "s", {}, 10)


def test_spans_and_parts_that_do_not_fit_are_refused(server: ChannelServer) -> None:
    whole = delivery(b"abc", b"def")
    for spans, parts in [([(0, 3)], whole.parts), ([(0, 3), (4, 6)], whole.parts), ([(0, 3), (3, 5)], whole.parts)]:
        with pytest.raises(TargetError, match="a part for each span of 6 tokens"):
            server.put(KEY, Delivery("payload", "", 6, spans, parts, "float32"))
    with pytest.raises(TargetError, match="parts of at most"):
        server.put(KEY, Delivery("payload", "", 3, [(0, 3)], [bytes(SEGMENT_BYTES + 1)], "float32"))


def answer_once(path: Path, content: bytes) -> threading.Thread:
    """A server that answers any request with these bytes and closes."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        connection, _ = listening.accept()
        connection.recv(1000)
        connection.sendall(content)
        connection.close()
        listening.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def frame(header: bytes, parts: bytes = b"") -> bytes:
    return len(header).to_bytes(4, "little") + header + parts


GOOD = (
    b'{"parts": [[3, "%s"]], "kind": "payload", "input_ids_digest": "", "num_tokens": 1, "spans": [[0, 1]], '
    b'"dtype": ""}'
)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (frame(GOOD % digest(b"abc").hex().encode(), b"abd"), "part 0 with digest"),
        (frame(GOOD % digest(b"abc").hex().encode(), b"ab"), "closed in the middle"),
        (frame(GOOD.replace(b"[0, 1]", b"[0, 2]") % digest(b"abc").hex().encode(), b"abc"), "a part for each span"),
        (frame(GOOD.replace(b"spans", b"span") % digest(b"abc").hex().encode(), b"abc"), "lacks or garbles 'spans'"),
        (frame(b"{"), "a header that does not read"),
        (frame(b"{}"), "a header that does not read"),
        (frame(b'{"parts": [[99999999, "00"]]}'), "a part of 99999999 bytes"),
        (b"\xff\xff\xff\xff", "a header of 4294967295 bytes"),
        (b"", "closed in the middle"),
    ],
)
def test_damage_on_the_way_is_an_error_before_anything_is_read(tmp_path: Path, content: bytes, error: str) -> None:
    thread = answer_once(tmp_path / "s", content)
    with pytest.raises(DeliveryError, match=error) as caught:
        ChannelClient(tmp_path / "s", timeout_s=5).take(KEY, 0)
    assert caught.value.transient
    thread.join()


def test_a_peer_that_breaks_off_takes_nothing(server: ChannelServer, client: ChannelClient) -> None:
    server.put(KEY, delivery(b"abc"))
    for content in (b"\x05", frame(b"nonsense"), frame(b'{"parts": []}')):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(server.path))
            peer.sendall(content)
    assert bytes(client.take(KEY, 1).parts[0]) == b"abc"


def test_an_engine_that_never_answers_counts_as_gone(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    with pytest.raises(EngineGone, match="timed out"):
        ChannelClient(tmp_path / "s", timeout_s=0.2).hello()
    listening.close()
