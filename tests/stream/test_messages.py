import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StreamError
from headrace.stream.messages import Action, FlightData, encoded, fields, flight_info, only_bytes


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_data_is_read_as_it_was_written(header: bytes, note: bytes, body: bytes) -> None:
    found = FlightData.decode(FlightData(header, note, body).encode())
    assert (bytes(found.header), bytes(found.app_metadata), bytes(found.body)) == (header, note, body)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=100), max_size=4))
def test_a_packed_body_is_placed_for_arrow(note: bytes, pieces: list[bytes]) -> None:
    message = FlightData.packed(note, pieces)
    found = FlightData.decode(message)
    assert bytes(found.body) == b"".join(pieces)
    assert bytes(found.app_metadata).startswith(note)
    assert not bytes(found.app_metadata)[len(note) :].strip()
    assert (len(message) - len(b"".join(pieces))) % 8 == 0


@given(st.binary(max_size=200))
def test_noise_is_read_within_its_bounds_or_refused(noise: bytes) -> None:
    try:
        found = list(fields(noise))
    except StreamError:
        return
    assert sum(len(view) for _, view in found) <= len(noise)


@pytest.mark.parametrize("wrong", [b"\x0a", b"\x0a\x05abc", b"\xff" * 11, b"\x0b\x01a", b"\x09abc", b"\x0d\x01"])
def test_what_does_not_add_up_is_refused(wrong: bytes) -> None:
    with pytest.raises(StreamError, match="Flight"):
        list(fields(wrong))


def test_numbers_between_byte_fields_are_skipped() -> None:
    message = b"\x08\x96\x01" + encoded({2: b"two"}) + b"\x19" + bytes(8) + b"\x25" + bytes(4) + encoded({1000: b"k"})
    assert [(number, bytes(view)) for number, view in fields(message)] == [(2, b"two"), (1000, b"k")]


def test_actions_and_flight_infos() -> None:
    assert Action.decode(Action("commit", b"body").encode()) == Action("commit", b"body")
    with pytest.raises(StreamError, match="not text"):
        Action.decode(encoded({1: b"\xff"}))
    info = flight_info(b"schema", encoded({2: b"ticket"}), 300)
    assert only_bytes(info, 1) == b"schema"
    assert only_bytes(only_bytes(only_bytes(info, 3), 1), 1) == b"ticket"
