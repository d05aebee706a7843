import os
from collections import Counter

from headrace.stream.reading import server_of


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
