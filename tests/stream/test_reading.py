import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.source import Position
from headrace.stream import reading
from headrace.stream.reading import server_of
from headrace.stream.supply import FolderSupply, Item
from tests.stream.serving import HOLE, make_store, positions, reader, served


def test_every_sample_has_one_server_and_each_server_its_share() -> None:
    ids = [os.urandom(16) for _ in range(4000)]
    shares = Counter(server_of(id, 4) for id in ids)
    assert set(shares) == set(range(4))
    assert max(shares.values()) < 1200
    assert [server_of(id, 1) for id in ids[:3]] == [0, 0, 0]
    assert [server_of(id, 4) for id in ids] == [server_of(id, 4) for id in ids]


def test_servers_do_not_follow_the_bits_that_say_what_is_kept() -> None:
    """Of the samples whose first bytes are small, each of two servers has about a half."""
    kept = [os.urandom(1)[:0] + bytes(8) + os.urandom(8) for _ in range(2000)]
    assert 850 < sum(server_of(id, 2) for id in kept) < 1150


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
