import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace.codec.spec import CodecSpec
from headrace.errors import StoreError, StreamError
from headrace.record import Record, digest
from headrace.source import Hole
from headrace.store.verify import BASIS_NAME
from headrace.stream.client import StreamSource
from headrace.stream.link import REFUSALS
from headrace.stream.reading import IN_FLIGHT
from headrace.testing.relay import Place, Relay
from headrace.testing.states import fake_record, same_records
from tests.stream.serving import HOLE, ServerProcess, make_store, positions, reader, reader_config, served

ROWS = [7, 3, 3, HOLE, 0, 12, 23, 1, 9, 0]


def through(relay: Relay, folder: Path, **settings: Any) -> StreamSource:
    return StreamSource(f"grpc://127.0.0.1:{relay.port}", reader_config(folder, **settings))


def expected(row: int) -> Record:
    return fake_record(row, 1, 3 if row % 3 == 0 else 1)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("request_bytes", [1, 3000, 1 << 20])
def test_records_come_as_they_are_stored_in_the_order_asked(tmp_path: Path, tls: bool, request_bytes: int) -> None:
    states = make_store(tmp_path / "states")
    with served(states, tmp_path / "serve", tls) as server:
        source = reader(server, tmp_path / "serve", tls, request_bytes=request_bytes)
        found = list(source.records(positions(*ROWS)))
        assert [item.row for item in found] == ROWS
        for item in found:
            if isinstance(item, Hole):
                assert item.reason == "states are not finite"
            else:
                assert same_records(item, expected(item.row))
        assert set(source.holes()) == {HOLE}
        assert source.manifest()["identity"]["prepared"] == "prepared-1"
        source.close()
        source.close()


@pytest.mark.parametrize("place", ["payload", "framing"])
def test_what_is_damaged_on_the_way_is_asked_for_again(tmp_path: Path, place: Place) -> None:
    states = make_store(tmp_path / "states", 24, num_tokens=100)
    with served(states, tmp_path / "serve") as server:
        relay = Relay(server.address.port)
        source = through(relay, tmp_path / "serve", request_bytes=50_000, read_ahead_bytes=200_000, silence_s=0.7)
        rows = [row for row in range(24) if row != HOLE] * 8
        for k, item in enumerate(source.records(positions(*rows, num_tokens=100))):
            if k % 40 == 10:
                relay.damage(place)
            assert isinstance(item, Record)
            assert same_records(item, fake_record(rows[k], 1, 3 if rows[k] % 3 == 0 else 1, 100))
        assert relay.num_damaged >= 4
        assert source.figures()["retries"] >= 4
        source.close()
        relay.close()


def test_a_reader_outlives_cuts_stalls_and_a_killed_server(tmp_path: Path) -> None:
    """Every position once, in order, whatever happens on the way."""
    states = make_store(tmp_path / "states", 24, num_tokens=100)
    with ServerProcess(states, tmp_path / "serve") as server:
        relay = Relay(server.port)
        source = through(relay, tmp_path / "serve", request_bytes=20_000, read_ahead_bytes=80_000, silence_s=1.0)
        rows = [row for row in range(24) if row != HOLE] * 10

        def restart() -> None:
            server.kill()
            time.sleep(0.5)
            server.start()

        def pause() -> None:
            server.pause()
            threading.Timer(2.0, server.go_on).start()

        troubles = {20: relay.cut, 50: restart, 80: lambda: relay.stall(2.0), 110: pause, 140: restart, 170: relay.cut}
        found = []
        for k, item in enumerate(source.records(positions(*rows, num_tokens=100))):
            if k in troubles:
                troubles[k]()
            assert isinstance(item, Record)
            assert same_records(item, fake_record(item.row, 1, 3 if item.row % 3 == 0 else 1, 100))
            found.append(item.row)
        assert found == rows
        assert source.figures()["retries"] >= len(troubles)
        source.close()
        relay.close()


def test_a_server_that_stays_away_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    with ServerProcess(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        config = reader_config(tmp_path / "serve", give_up_s=2.0, silence_s=1.0)
        source = StreamSource(f"grpc://127.0.0.1:{server.port}", config)
        records = source.records(positions(*range(24)))
        assert next(records).row == 0
        source.close()
        server.kill()
        began = time.monotonic()
        again = StreamSource(f"grpc://127.0.0.1:{server.port}", config)
        with pytest.raises(StreamError, match="within 2 s"):
            list(again.records(positions(1)))
        assert 1.5 < time.monotonic() - began < 10.0
        again.close()


def test_a_refusal_is_told_at_once(tmp_path: Path) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        other = tmp_path / "other-token"
        other.write_text("another token, of others\n".replace(" ", "-"))
        other.chmod(0o600)
        config = reader_config(tmp_path / "serve", token_file=str(other))
        source = StreamSource(f"grpc://127.0.0.1:{server.address.port}", config)
        began = time.monotonic()
        with pytest.raises(StreamError, match=r"stream\.token_file") as caught:
            source.manifest()
        assert time.monotonic() - began < 5.0
        assert "another" not in str(caught.value)
        source.close()
        source = reader(server, tmp_path / "serve")
        with pytest.raises(StreamError, match="its log says why"):
            list(source.records(positions(99)))
        source.close()


def test_other_states_are_refused_and_the_field_is_named(tmp_path: Path) -> None:
    first, other = make_store(tmp_path / "a"), make_store(tmp_path / "b", prepared="prepared-2")
    with served(first, tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve")
        assert len(list(source.records(positions(1)))) == 1
        port = server.address.port
    with served(other, tmp_path / "serve", address=f"127.0.0.1:{port}"):
        with pytest.raises(StoreError, match="prepared 'prepared-1', not 'prepared-2'"):
            list(source.records(positions(1)))
        assert source.figures()["retries"] >= REFUSALS
        source.close()


def test_samples_are_spread_over_servers_of_the_same_states(tmp_path: Path) -> None:
    a, b, c = (make_store(tmp_path / name) for name in "abc")
    other = make_store(tmp_path / "d", dtype="float16")
    with served(a, tmp_path / "s") as one, served(b, tmp_path / "s") as two, served(c, tmp_path / "s") as three:
        text = ",".join(f"grpc://127.0.0.1:{server.address.port}" for server in (one, two, three))
        source = StreamSource(text, reader_config(tmp_path / "s", read_ahead_bytes=30_000))
        rows = list(range(24)) * 5
        assert [item.row for item in source.records(positions(*rows))] == rows
        assert all(server.counts.records > 10 for server in (one, two, three))
        source.close()
        with served(other, tmp_path / "s") as wrong:
            source = StreamSource(f"{text},grpc://127.0.0.1:{wrong.address.port}", reader_config(tmp_path / "s"))
            with pytest.raises(StoreError, match="dtype"):
                source.manifest()
            source.close()


def test_read_ahead_is_bounded_in_bytes(tmp_path: Path) -> None:
    """Records grow a hundredfold in the middle, so that a bound in records would not hold."""
    states = make_store(tmp_path / "states", 40, num_tokens=1000)
    with served(states, tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", read_ahead_bytes=500_000, request_bytes=100_000)
        rows = [row for row in range(40) if row != HOLE]
        records = source.records(positions(*rows, num_tokens=1000))
        for _ in range(5):
            next(records)
        time.sleep(1.0)
        sent = server.counts.wire_bytes
        time.sleep(0.5)
        assert server.counts.wire_bytes == sent
        assert sent < 5 * 70_000 + 500_000 + 2 * 100_000
        assert len(list(records)) == len(rows) - 5
        source.close()


def test_commits_reach_the_server_with_requests_and_at_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        server._service._supply.commit = lambda reader, position: told.append((reader, position.place))
        source = reader(server, tmp_path / "serve")
        asked = positions(*range(8))
        list(source.records(asked[:2]))
        assert told == []
        source.commit(asked[2])
        list(source.records(asked[2:4]))
        assert set(told) == {("trainer", 2)}
        source.commit(asked[4])
        source.close()
        assert told[-1] == ("trainer", 4)


CHILD = """
import multiprocessing, sys
from pathlib import Path
from headrace.store.verify import BASIS_NAME
from headrace.stream.client import StreamSource
from tests.stream.serving import positions, reader_config

def count(source, answer):
    answer.put(len(list(source.records(positions(*range(8))))))
    source.close()

if __name__ == "__main__":
    source = StreamSource(f"grpc://127.0.0.1:{sys.argv[1]}", reader_config(Path(sys.argv[2])))
    context = multiprocessing.get_context(sys.argv[3])
    answer = context.Queue()
    child = context.Process(target=count, args=(source, answer), daemon=True)
    child.start()
    print(answer.get(timeout=30))
    child.join(30)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_source_may_be_made_before_a_process_that_reads(tmp_path: Path, method: str) -> None:
    (tmp_path / "parent.py").write_text(CHILD)
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        command = [
            sys.executable,
            str(tmp_path / "parent.py"),
            str(server.address.port),
            str(tmp_path / "serve"),
            method,
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("8", 0), done.stderr


def test_a_source_that_was_used_before_a_fork_is_refused_in_the_child(tmp_path: Path) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve")
        list(source.records(positions(1)))
        source._links[0]._process = os.getpid() + 1  # as in a child
        with pytest.raises(StreamError, match="before the fork"):
            list(source.records(positions(1)))
        again = pickle.loads(pickle.dumps(source))
        assert len(list(again.records(positions(1)))) == 1
        again.close()


def test_a_consumer_is_not_left_waiting_by_a_fault_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, message: bytes) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("headrace.stream.wire.Unpacking.parts", broken)
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve")
        with pytest.raises(KeyError, match="a fault"):
            list(source.records(positions(1)))
        source.close()


def test_a_fitted_basis_is_fetched_and_checked(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    codec = CodecSpec("latent", 4, 2, 8, "float32", {"basis": digest(content).hex()})
    states = make_store(tmp_path / "states", codec=codec)
    with served(states, tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", give_up_s=1.0)
        with pytest.raises(StreamError, match="none yet"):
            source.basis(tmp_path / "here")
        (states / BASIS_NAME).write_bytes(content[:-1])
        with pytest.raises(StreamError, match="a basis with digest"):
            source.basis(tmp_path / "here")
        assert not (tmp_path / "here").exists()
        (states / BASIS_NAME).write_bytes(content)
        source.basis(tmp_path / "here")
        assert (tmp_path / "here").read_bytes() == content
        source.close()


def test_a_record_is_let_go_with_its_consumer(tmp_path: Path) -> None:
    """Nothing of a pass keeps what it has handed on, not even until rubbish is collected."""
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", request_bytes=3000)
        gc.disable()
        try:
            given = [weakref.ref(item) for item in source.records(positions(*[0, 1, 2, 3, 4] * 4))]
            assert sum(ref() is not None for ref in given) <= 1 + IN_FLIGHT  # and what each request made last
        finally:
            gc.enable()
        source.close()
