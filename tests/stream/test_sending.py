import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from headrace.codec.spec import CodecSpec
from headrace.record import make_record, segment_spans
from headrace.source import Hole
from headrace.store.folder_source import FolderSource
from headrace.store.writer import StoreWriter
from headrace.stream.client import StreamSource
from headrace.stream.guard import Unavailable
from headrace.stream.messages import SERVICE, encoded
from headrace.stream.secrets import TOKEN
from headrace.stream.sending import Sending
from headrace.stream.supply import FolderSupply, Item
from headrace.stream.window import Answer, Window
from headrace.stream.wire import PIECE_BYTES, Ticket, Unpacking
from headrace.testing.states import fake_manifest, fake_sample
from tests.stream.filling import spoil
from tests.stream.serving import HOLE, ServerProcess, make_store, positions, reader_config

MIB = 1024 * 1024


class Watched:
    """The messages of an answer over a store, and what the window held while each of them was on its way."""

    def __init__(self, states: Path, *rows: int, num_tokens: int = 12) -> None:
        self.supply = FolderSupply(FolderSource(states, 2))
        self.window = Window(256 * MIB, 60.0)
        self.answer: Answer = self.window.begin(lambda: None)
        self.asked = positions(*rows, num_tokens=num_tokens)
        self.held: list[int] = []

    def messages(self) -> Iterator[bytes]:
        items: list[Item] = self.supply.take(self.asked, 1 << 40, 0.0)
        for message in Sending(self.answer, self.asked, self.supply.damaged, True).messages(items):
            self.held.append(self.window.num_bytes)
            yield message
        assert self.window.num_bytes == 0

    def rows(self) -> list[int]:
        unpacking = Unpacking()
        return [place for message in self.messages() for place, _ in unpacking.parts(message)]


def test_an_answer_holds_one_segment_of_a_record_on_disk(tmp_path: Path) -> None:
    store_of_one(tmp_path, 40 * MIB)
    own = Watched(tmp_path, 0, num_tokens=40 * MIB // LARGE)
    assert own.rows() == [0] * 5
    assert len(own.held) == 5 * 5  # four pieces each, and the end that framing adds
    assert max(own.held) < 8 * MIB + 2 * PIECE_BYTES + 65536 * 2


def test_what_is_damaged_ends_the_answer_before_it_and_is_a_hole_next_time(tmp_path: Path) -> None:
    states = make_store(tmp_path)
    spoil(states, 2)
    own = Watched(states, 1, HOLE, 2, 4)
    assert own.rows() == [0, 1]
    assert own.rows() == [0, 1, 2, 3]
    assert isinstance(own.supply.holes()[2], Hole)


def test_what_is_damaged_in_the_middle_is_asked_for_again(tmp_path: Path) -> None:
    states = make_store(tmp_path)
    spoil(states, 3, segment=1)
    own = Watched(states, 1, 3, 4)
    with pytest.raises(Unavailable, match="a whole record"):
        own.rows()
    assert own.rows() == [0, 1, 2]
    assert isinstance(own.supply.holes()[3], Hole)


LARGE = 65536  # bytes a token


def store_of_one(root: Path, num_bytes: int) -> None:
    """Row 0 has so many bytes of payload; rows 1 to 8 have two tokens each."""
    codec = CodecSpec("raw", 0, 1, LARGE // 2, "bfloat16")
    with StoreWriter(root, fake_manifest(codec=codec), shard_bytes=1 << 30, shard_seconds=1e9) as writer:
        for row, num_tokens in enumerate([num_bytes // LARGE] + [2] * 8):
            spans = segment_spans(num_tokens, LARGE)
            payloads = [bytes([row]) * ((end - start) * LARGE) for start, end in spans]
            writer.add(make_record(fake_sample(row, num_tokens), spans, payloads, writer.generation))


def test_stalled_readers_of_a_large_record_hold_the_window_and_the_good_one_goes_on(tmp_path: Path) -> None:
    """40 readers ask for a record of 64 MiB within a window of 16 MiB, and take nothing."""
    store_of_one(tmp_path / "states", 64 * MIB)
    (large,), small = positions(0, num_tokens=64 * MIB // LARGE), positions(*range(1, 9), num_tokens=2)
    ticket = encoded({1: Ticket((large,), 1 << 30, packed=True).encode()})
    with ExitStack() as stack:
        settings = {"window_bytes": 16 * MIB, "stall_s": 60.0}
        server = stack.enter_context(ServerProcess(tmp_path / "states", tmp_path / "serve", **settings))
        token = (tmp_path / "serve" / TOKEN).read_text().strip()
        source = StreamSource(f"grpc://127.0.0.1:{server.port}", reader_config(tmp_path / "serve"))
        stack.callback(source.close)
        list(source.records(small))
        before = server.resident_bytes
        for _ in range(40):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options))
            call = channel.unary_stream(f"/{SERVICE}/DoGet")(ticket, metadata=[("authorization", f"Bearer {token}")])
            stack.callback(call.cancel)
        time.sleep(2.0)
        began = time.monotonic()
        assert [item.row for item in source.records([large, *small])] == list(range(9))
        assert time.monotonic() - began < 30.0
        assert server.peak_bytes - before < (16 + 96) * MIB
