import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from headrace.errors import StreamError
from headrace.record import SCHEMA, digest, segment_from_message
from headrace.stream.messages import SERVICE, FlightData, encoded
from headrace.stream.secrets import TOKEN, make_files
from headrace.stream.server import ACTIONS, Secrets, Server
from headrace.stream.wire import Ticket, batch_message
from headrace.testing.states import fake_record
from tests.stream.serving import CERTIFICATE, HOLE, ServerProcess, make_store, positions, reader, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as own:
        yield own


def token(tmp_path: Path) -> str:
    return (tmp_path / "serve" / TOKEN).read_text().strip()


def bearer(text: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {text}")]


def stock_ticket(*rows: int) -> bytes:
    return json.dumps({"positions": [[p.epoch, p.place, p.row, p.id.hex()] for p in positions(*rows)]}).encode()


@pytest.mark.parametrize("tls", [False, True])
def test_a_stock_flight_client_reads_batches(tmp_path: Path, tls: bool) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve", tls) as server:
        roots = (tmp_path / "serve" / CERTIFICATE).read_bytes() if tls else None
        scheme = "grpc+tls" if tls else "grpc"
        client = flight.connect(f"{scheme}://127.0.0.1:{server.address.port}", tls_root_certs=roots)
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token(tmp_path)}".encode())])
        info = client.get_flight_info(flight.FlightDescriptor.for_command(stock_ticket(0, HOLE, 1)), options)
        assert (info.total_records, info.schema) == (3, SCHEMA)
        stream = client.do_get(info.endpoints[0].ticket, options)
        assert stream.schema == SCHEMA
        chunks = [stream.read_chunk() for _ in range(5)]
        batches = [chunk.data for chunk in chunks if chunk.data is not None]
        table = pa.Table.from_batches(batches)
        assert table["row"].to_pylist() == [0, 0, 0, 1]
        stored = [s for row, parts in ((0, 3), (1, 1)) for s in fake_record(row, 1, parts).segments]
        assert table["payload"].to_pylist() == [bytes(s.payload) for s in stored]
        holes = [json.loads(c.app_metadata.to_pybytes())["items"] for c in chunks if c.data is None]
        assert holes == [[[1, "states are not finite"]]]
        with pytest.raises(StopIteration):
            stream.read_chunk()
        assert {a.type for a in client.list_actions(options)} == set(ACTIONS)
        manifest = json.loads(next(iter(client.do_action("manifest", options=options))).body.to_pybytes())
        assert manifest["identity"]["prepared"] == "prepared-1"
        client.close()


def test_a_batch_and_its_header_are_the_stored_message(server: Server, tmp_path: Path) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.address.port}") as channel:
        call = channel.unary_stream(f"/{SERVICE}/DoGet")
        answers = [FlightData.decode(m) for m in call(encoded({1: stock_ticket(3)}), metadata=bearer(token(tmp_path)))]
    for k, answer in enumerate(answers[1:]):
        ((place, length, seal),) = json.loads(bytes(answer.app_metadata))["items"]
        message = batch_message(answer.header, answer.body)
        assert (place, length, seal) == (0, len(message), digest(message).hex())
        assert segment_from_message(message, bytes.fromhex(seal)).segment == k


CALLS = {
    "DoGet": encoded({1: stock_ticket(1)}),
    "DoAction": encoded({1: b"manifest"}),
    "ListActions": b"",
    "GetFlightInfo": encoded({2: stock_ticket(1)}),
}


@pytest.mark.parametrize("given", [None, "", "wrong", "a token that is as long as the real one is, or longer"])
@pytest.mark.parametrize("method", CALLS)
def test_without_the_token_nothing_is_told(server: Server, tmp_path: Path, method: str, given: str | None) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.address.port}") as channel:
        call = channel.unary_stream(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(CALLS[method], metadata=None if given is None else bearer(given)))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    told = caught.value.details()
    assert token(tmp_path) not in told
    assert str(tmp_path) not in told


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("DoGet", b"\xff\xff\xff", "INVALID_ARGUMENT"),
        ("DoGet", encoded({1: b"{}"}), "INVALID_ARGUMENT"),
        ("DoGet", encoded({1: b"[" * 20_000}), "INVALID_ARGUMENT"),
        ("DoGet", encoded({1: stock_ticket(*[1] * 300)}), "INVALID_ARGUMENT"),
        ("DoGet", encoded({1: stock_ticket(1)[:-3] + b'x"]]}'}), "INVALID_ARGUMENT"),
        ("DoGet", encoded({1: stock_ticket(99)}), "DATA_LOSS"),
        ("DoAction", encoded({1: b"shutdown"}), "INVALID_ARGUMENT"),
        ("DoAction", encoded({1: b"basis"}), "INVALID_ARGUMENT"),
        ("DoAction", encoded({1: b"commit", 2: b"{}"}), "INVALID_ARGUMENT"),
        ("DoExchange", b"", "UNIMPLEMENTED"),
        ("DoPut", b"", "UNIMPLEMENTED"),
    ],
)
def test_what_cannot_be_answered_is_refused_without_paths_or_traces(
    server: Server, tmp_path: Path, method: str, request_: bytes, code: str
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.address.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(f"/{SERVICE}/{method}")(request_, metadata=bearer(token(tmp_path))))
    assert caught.value.code().name == code
    told = caught.value.details()
    assert str(tmp_path) not in told
    assert "Traceback" not in told
    assert ".py" not in told
    assert token(tmp_path) not in told


def test_a_large_message_is_refused_before_it_is_held(tmp_path: Path) -> None:
    """300 MB, from a stranger and from a friend: the server's memory does not follow."""
    with ServerProcess(make_store(tmp_path / "states"), tmp_path / "serve") as process:
        before = process.peak_bytes
        huge = bytes(300_000_000)
        for given in ("wrong", token(tmp_path)):
            with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
                call = channel.unary_stream(f"/{SERVICE}/DoGet")(huge, metadata=bearer(given), timeout=60)
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
            assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED)
        assert process.peak_bytes - before < 64 * 1024 * 1024


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("greeting", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"])
def test_connections_that_do_not_speak_are_closed(tmp_path: Path, tls: bool, greeting: bytes) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve", tls) as server:
        strangers = [socket.create_connection(("127.0.0.1", server.address.port)) for _ in range(100)]
        began = time.monotonic()
        for stranger in strangers:
            stranger.sendall(greeting)
            stranger.settimeout(10.0)
        source = reader(server, tmp_path / "serve", tls)
        assert len(list(source.records(positions(*range(5))))) == 5  # meanwhile others are served
        source.close()
        for stranger in strangers:
            while stranger.recv(1024):
                pass
            stranger.close()
        assert time.monotonic() - began < 10.0


def test_beyond_loopback_a_certificate_is_needed(tmp_path: Path) -> None:
    states = make_store(tmp_path / "states")
    for address in ("0.0.0.0:0", "[::]:0", "somewhere:0"):
        with pytest.raises(StreamError, match="beyond loopback"), served(states, tmp_path / "serve", address=address):
            pass
    with served(states, tmp_path / "serve", True, address="0.0.0.0:0") as server:
        source = reader(server, tmp_path / "serve", True)
        assert len(list(source.records(positions(1)))) == 1
        source.close()


def test_a_port_that_is_taken_is_an_error(server: Server, tmp_path: Path) -> None:
    with (
        pytest.raises(StreamError, match="the address is taken"),
        served(tmp_path / "states", tmp_path / "serve", address=f"127.0.0.1:{server.address.port}"),
    ):
        pass


def test_a_token_is_always_needed(tmp_path: Path) -> None:
    make_files(tmp_path, [])
    (tmp_path / TOKEN).unlink()
    from headrace.kinds import ServeConfig

    with pytest.raises(StreamError, match="a token"):
        Secrets.read(ServeConfig(), tmp_path)


def test_readers_that_stall_hold_bounded_memory_and_hold_up_nobody(tmp_path: Path) -> None:
    """40 readers ask for 2 MB each and take nothing, within a window of 16 MiB; another one reads on."""
    states = make_store(tmp_path / "states", 6, num_tokens=1 << 15)
    with served(states, tmp_path / "serve", window_bytes=16 * 1024 * 1024, stall_s=60.0) as server:
        rows = (0, 1, 2, 3)
        asked = positions(*rows, num_tokens=1 << 15)
        ticket = encoded({1: Ticket(tuple(asked), 1 << 30, packed=True).encode()})
        channels = [
            grpc.insecure_channel(
                f"127.0.0.1:{server.address.port}",
                options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)],
            )
            for _ in range(40)
        ]
        stalled = [c.unary_stream(f"/{SERVICE}/DoGet")(ticket, metadata=bearer(token(tmp_path))) for c in channels]
        time.sleep(1.0)
        assert server.window.num_bytes <= 16 * 1024 * 1024
        source = reader(server, tmp_path / "serve", give_up_s=30.0)
        began = time.monotonic()
        assert [r.row for r in source.records(asked * 3)] == list(rows) * 3
        assert time.monotonic() - began < 20.0
        assert server.window.num_cut > 0
        source.close()
        for call in stalled:
            call.cancel()
        for channel in channels:
            channel.close()


def test_a_reader_that_leaves_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    states = make_store(tmp_path / "states", 6, num_tokens=1 << 15)
    with served(states, tmp_path / "serve") as server:
        before = threading.active_count()
        for _ in range(3):
            source = reader(server, tmp_path / "serve")
            records = source.records(positions(0, 1, 2, num_tokens=1 << 15))
            assert next(records).row == 0
            source.close()
        until = time.monotonic() + 5.0
        while (server.counts.active or server.window.num_bytes) and time.monotonic() < until:
            time.sleep(0.05)
        assert (server.counts.active, server.window.num_bytes) == (0, 0)
        assert threading.active_count() < before + 30
