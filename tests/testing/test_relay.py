import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headrace.testing.relay import Relay, _Frames


def frame(payload: bytes, kind: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + payload


@pytest.fixture
def speaker() -> Iterator[tuple[int, bytes]]:
    """A server that says a small frame and two large ones, whatever it hears."""
    said = frame(b"settings", 4) + frame(bytes(1000)) + frame(bytes(2000))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    own, _ = listener.accept()
                except OSError:
                    return
                with own:
                    own.recv(1)
                    own.sendall(said)
                    own.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], said
        listener.shutdown(socket.SHUT_RDWR)


def hear(port: int, num_bytes: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as own:
        own.sendall(b"x")
        heard = b""
        while len(heard) < num_bytes and (more := own.recv(1 << 16)):
            heard += more
        return heard


def test_bytes_are_carried_as_they_are_and_later(speaker: tuple[int, bytes]) -> None:
    port, said = speaker
    relay = Relay(port, delay_s=0.05)
    began = time.monotonic()
    assert hear(relay.port, len(said)) == said
    assert time.monotonic() - began >= 0.1  # there and back
    assert relay.num_connections == 1
    relay.close()
    relay.close()


@pytest.mark.parametrize("place", ["payload", "framing"])
def test_one_bit_is_turned_where_it_was_asked(speaker: tuple[int, bytes], place: str) -> None:
    port, said = speaker
    relay = Relay(port)
    relay.damage(place)  # type: ignore[arg-type]
    heard = hear(relay.port, len(said))
    wrong = [k for k, (a, b) in enumerate(zip(heard, said, strict=True)) if a != b]
    first = len(frame(b"settings", 4))
    assert len(wrong) == 1
    assert (first + 9 <= wrong[0] < first + 1009) if place == "payload" else wrong[0] == first
    assert relay.num_damaged == 1
    assert hear(relay.port, len(said)) == said
    relay.close()


def test_connections_are_cut_and_held_up(speaker: tuple[int, bytes]) -> None:
    port, said = speaker
    relay = Relay(port)
    with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as own:
        own.sendall(b"x")
        assert own.recv(9)
        relay.cut()
        with suppress(ConnectionResetError):
            while own.recv(1 << 16):  # what was on its way comes first, then an end, not a time-out
                pass
    relay.stall(0.5)
    began = time.monotonic()
    assert hear(relay.port, len(said)) == said
    assert time.monotonic() - began >= 0.4
    relay.close()


def test_frames_are_followed_however_they_are_cut() -> None:
    said = frame(bytes(300)) + frame(b"x") + frame(bytes(400)) + frame(bytes(500), 1) + frame(bytes(600))
    starts = [0, 319, 319 + 409 + 509]
    for size in (1, 7, 9, 10, 11, 200, 400, len(said)):
        frames, found = _Frames(), []
        for at in range(0, len(said), size):
            found += [at + start for start, _, _ in frames.within(bytearray(said[at : at + size]))]
        assert set(found) <= set(starts)
        if size == len(said):
            assert found == starts
    frames = _Frames()
    assert frames.within(bytearray(said[:1240])) == [(0, 9, 309), (319, 328, 728)]
    assert frames.within(bytearray(said[1240:] + frame(bytes(700)))) == [(606, 615, 1315)]
