import json
from collections.abc import Iterable

import pytest

from headrace.errors import StreamError
from headrace.record import Record, Segment, sealed_message, segment_to_message
from headrace.source import Hole, Position
from headrace.store.digested import dump_digested
from headrace.stream.messages import FlightData
from headrace.stream.wire import (
    MAX_POSITIONS,
    MAX_REQUEST_BYTES,
    PIECE_BYTES,
    Sealed,
    Ticket,
    Unpacking,
    batch_message,
    check_item,
    decode_commit,
    encode_commit,
    identity_digest,
    packed_messages,
    plain_message,
)
from headrace.testing.states import fake_manifest, fake_record, fake_sample
from tests.stream.serving import positions

FULL = Ticket(tuple(positions(*range(MAX_POSITIONS))), 1 << 40, "i" * 32, "r" * 64, positions(1)[0], packed=True)


def test_a_ticket_comes_back_and_fits_into_a_message() -> None:
    assert Ticket.decode(FULL.encode()) == FULL
    assert len(FULL.encode()) < MAX_REQUEST_BYTES
    assert decode_commit(encode_commit("me", positions(3)[0])) == ("me", positions(3)[0])


def test_any_changed_byte_of_a_ticket_is_noticed() -> None:
    content = Ticket(tuple(positions(1, 2)), 100, "i" * 32, "r", positions(1)[0], packed=True).encode()
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        with pytest.raises(StreamError):
            Ticket.decode(changed)


def test_a_ticket_without_a_digest_asks_and_commits_nothing() -> None:
    place = [0, 3, 7, fake_sample(7).id.hex()]
    assert Ticket.decode(json.dumps({"positions": [place]}).encode()).positions == (
        Position(0, 3, 7, fake_sample(7).id),
    )
    with pytest.raises(StreamError, match="a digest on a ticket that commits"):
        Ticket.decode(json.dumps({"positions": [place], "committed": place}).encode())


@pytest.mark.parametrize(
    "change",
    [{"positions": []}, {"positions": [[0, 0, 0]]}, {"positions": [[0, 0, -1, "00" * 16]]}, {"max_bytes": "1"},
     {"positions": [[0, 0, 0, "zz" * 16]]}, {"positions": [[0.0, 0, 0, "00" * 16]]}, {"more": 1}, {"reader": 3},
     {"max_bytes": True}, {"positions": "all"}],
)  # fmt: skip
def test_other_tickets_are_refused(change: dict[str, object]) -> None:
    value = {"positions": [[0, 0, 0, "00" * 16]], **change}
    with pytest.raises(StreamError):
        Ticket.decode(json.dumps(value).encode())


Content = tuple[int, Sealed | str]


def contents(items: list[tuple[int, Record | Hole]]) -> list[Content]:
    found: list[Content] = []
    for place, item in items:
        found += (
            [(place, item.reason)] if isinstance(item, Hole) else [(place, sealed_message(s)) for s in item.segments]
        )
    return found


def unpacked(messages: Iterable[bytes]) -> list[tuple[int, Segment | str]]:
    unpacking = Unpacking()
    return [part for message in messages for part in unpacking.parts(message)]


def test_records_and_holes_cross_in_order_as_their_bytes() -> None:
    record, hole = fake_record(3, 1, 3), Hole(4, fake_sample(4).id, "no states")
    large = fake_record(5, 1, 1, 80_000)  # more than two messages
    given = contents([(0, record), (1, hole)]), contents([(2, large)]), contents([(3, hole), (4, record)])
    messages = [message for group in given for message in packed_messages(group)]
    assert len(messages) == 5
    assert max(map(len, messages)) < PIECE_BYTES + 4096
    found = unpacked(messages)
    assert [place for place, _ in found] == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    sent = [bytes(segment_to_message(s)) for s in (*record.segments, *large.segments, *record.segments)]
    assert [bytes(segment_to_message(part)) for _, part in found if not isinstance(part, str)] == sent
    assert [part for _, part in found if isinstance(part, str)] == ["no states"] * 2
    plain = [FlightData.decode(plain_message(*content)) for group in given for content in group]
    assert [batch_message(m.header, m.body) for m in plain if len(m.body)] == sent


def test_a_segment_whose_end_does_not_come_or_is_another_is_not_given() -> None:
    first, second, third = packed_messages(contents([(0, fake_record(5, 1, 1, 80_000))]))
    assert unpacked([first, second]) == []
    with pytest.raises(StreamError, match="a segment as it was sent"):
        unpacked([first, third, second])
    with pytest.raises(StreamError, match="one at a time"):
        unpacked([first, first])
    huge = FlightData(app_metadata=dump_digested({"items": [[0, 1 << 30, "00" * 16]]}).encode(), body=b"0").encode()
    with pytest.raises(StreamError, match="a segment of at most"):
        unpacked([huge])


def test_any_changed_byte_of_an_answer_is_noticed() -> None:
    items: list[tuple[int, Record | Hole]] = [(0, fake_record(3, 1, 2, 6)), (1, Hole(4, fake_sample(4).id, "no"))]
    (message,) = packed_messages(contents(items))
    whole = [(place, part if isinstance(part, str) else bytes(part.payload)) for place, part in unpacked([message])]
    for at in range(len(message)):
        changed = message[:at] + bytes([message[at] ^ 4]) + message[at + 1 :]
        try:
            found = [(place, p if isinstance(p, str) else bytes(p.payload)) for place, p in unpacked([changed])]
        except StreamError:
            continue
        assert found in (whole, []), at  # a padding byte, or a message that says nothing: it is asked for again


def test_an_item_of_another_sample_is_refused() -> None:
    check_item(positions(3)[0], fake_record(3, 1))
    with pytest.raises(StreamError, match="row 4"):
        check_item(positions(3)[0], fake_record(4, 1))


def test_identities_are_told_apart() -> None:
    one, other = (fake_manifest(**change).to_json() for change in ({}, {"dtype": "float16"}))
    assert identity_digest(one) == identity_digest({**one, "provenance": {}})
    assert identity_digest(one) != identity_digest(other)
    assert FlightData().encode() == b""
