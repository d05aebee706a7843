import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.errors import StreamError
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.stream import reading
from headrace.stream.link import Link
from headrace.stream.reading import Reading
from headrace.stream.supply import FolderSupply, Item
from tests.stream.serving import HOLE, make_store, positions, reader, served


def test_what_a_request_did_not_bring_is_asked_for_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are 30 times larger than first thought: requests go by order, not each for a stretch of its own."""
    ahead: list[int] = []
    given = 0
    take = FolderSupply.take

    def counted(self: FolderSupply, asked: Sequence[Position], max_bytes: int, wait_s: float) -> list[Item]:
        nonlocal given
        ahead.append(asked[0].place - given)
        found = take(self, asked, max_bytes, wait_s)
        given += len(found)
        return found

    monkeypatch.setattr(FolderSupply, "take", counted)
    monkeypatch.setattr(reading, "_FIRST_GUESS", 200)
    rows = [row for row in range(24) if row != HOLE] * 10
    with served(make_store(tmp_path / "states", num_tokens=100), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", request_bytes=20_000, read_ahead_bytes=400_000)
        assert [item.row for item in source.records(positions(*rows, num_tokens=100))] == rows
        source.close()
    assert len(ahead) > 30
    assert max(ahead) < 10


def test_closing_the_source_ends_a_pass_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderSupply, "take", lambda *_: [])  # nothing yet, ever
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve")
        threading.Timer(0.5, source.close).start()
        with pytest.raises(StreamError, match=r"a (pass|source) that is open"):
            list(source.records(positions(1)))


def test_a_pass_that_nobody_closed_lets_the_process_end(tmp_path: Path) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        script = f"""
from pathlib import Path
from headrace.stream.client import StreamSource
from tests.stream.serving import positions, reader_config
items = StreamSource("grpc://127.0.0.1:{server.address.port}", reader_config(Path({str(tmp_path / "serve")!r})))
items = items.records(positions(0, 1, 2))
print(next(items).row)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
        assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_fault_behind_the_last_record_of_an_answer_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    left = times
    ask = Reading._ask

    def broken(self: Reading, link: Link, slots: list[object], promised: int) -> int:
        nonlocal left
        came = ask(self, link, slots, promised)
        left -= 1
        if left == 0:
            raise KeyError("a fault")
        return came

    monkeypatch.setattr(Reading, "_ask", broken)
    with served(make_store(tmp_path / "states"), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", request_bytes=1)
        with pytest.raises(KeyError, match="a fault"):
            list(source.records(positions(*[0, 1, 2, 3] * 200)))
        source.close()


def test_holes_say_nothing_about_the_size_of_records(tmp_path: Path) -> None:
    taken = 0

    def counted() -> Iterator[Position]:
        nonlocal taken
        for position in positions(HOLE, HOLE, HOLE, *itertools.islice(itertools.cycle(range(5)), 5000), num_tokens=100):
            taken += 1
            yield position

    with served(make_store(tmp_path / "states", num_tokens=100), tmp_path / "serve") as server:
        source = reader(server, tmp_path / "serve", request_bytes=20_000, read_ahead_bytes=400_000)
        found = source.records(counted())
        assert [type(next(found)) for _ in range(4)] == [Hole, Hole, Hole, Record]
        assert taken < 100
        source.close()
