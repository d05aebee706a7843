"""FillSupply with workers in this process, whose records are made up: what comes when, whatever dies or is late."""

import random
import resource
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config import RunFile
from headrace.errors import CaptureError, ConfigError, StreamError
from headrace.kinds import ServeConfig
from headrace.order import CaptureGroup, is_kept, server_of
from headrace.prepare.prepared import PreparedSet
from headrace.record import Record, Sample, digest, make_record
from headrace.source import Hole, Position
from headrace.store.manifest import Manifest
from headrace.stream.client import StreamSource
from headrace.stream.fill import FillSupply
from headrace.stream.secrets import make_files
from headrace.stream.server import Secrets, Server
from headrace.stream.worker import Failed, GroupWorker, WorkerDied
from headrace.testing.states import fake_manifest
from tests.stream.filling import LENGTHS, WAIT_S, Notes, content, heldout_positions, new_run, positions, read, spoil
from tests.stream.serving import reader_config


def made(sample: Sample, group: CaptureGroup, generation: int) -> Record:
    """Bytes that depend on the sample and on its whole group."""
    seed = digest(sample.id, repr(group.rows).encode())
    payload = (seed * 4) * sample.num_tokens  # 64 bytes a token, as fake_manifest's codec says
    return make_record(sample, [(0, sample.num_tokens)], [payload], generation)


class Made:
    """A worker in this process: late, dying or failing as `act` says for each item."""

    def __init__(self, prepared: PreparedSet, act: Callable[[int], None] = lambda row: None) -> None:
        self._prepared, self._act = prepared, act
        self.captured: list[int] = []
        self.broken: set[int] = set()
        self.closed = False

    def open(self) -> Manifest:
        return fake_manifest()

    def keep_basis(self) -> None:
        pass

    def capture(self, group: CaptureGroup, wanted: Collection[int], generation: int) -> Iterator[Record | Failed]:
        if self.closed:
            raise WorkerDied("", "closed", "")
        self.captured.append(group.rows[0])
        for row in group.rows:
            if row in wanted:
                self._act(row)
                spoiled = row in self.broken
                yield Failed(row, "not finite") if spoiled else made(self._prepared.sample(row), group, generation)

    def last_lines(self) -> str:
        return "the last line"

    def close(self) -> None:
        self.closed = True


class Stage:
    """A run, its supply and the workers behind it."""

    def __init__(
        self, root: Path, act: Callable[[int], None] = lambda row: None, lengths: Sequence[int] = LENGTHS, **serve: Any
    ) -> None:
        self.cfg, self.folder = new_run(root / "no-target", root / "run", lengths, **serve)
        self.prepared, self.notes = PreparedSet.open(self.folder.prepared), Notes()
        self.workers: list[Made] = []
        self._act = act

    def open(self, cfg: RunFile | None = None) -> FillSupply:
        def worker(_: int) -> GroupWorker:
            self.workers.append(Made(self.prepared, self._act))
            return self.workers[-1]

        return FillSupply(cfg or self.cfg, self.folder, self.notes, worker)

    def epoch(self, epoch: int) -> list[Position]:
        return positions(self.cfg, self.folder, epoch)

    def expected(self, supply: FillSupply, wanted: list[Position]) -> list[Any]:
        groups = supply._demand.groups
        return [content(made(self.prepared.sample(p.row), groups[supply._demand.group(p.row)], 1)) for p in wanted]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_position_comes_in_order_with_the_bytes_of_its_group(tmp_path: Path, share: float) -> None:
    stage = Stage(tmp_path, keep_share=share)
    supply = stage.open()
    for epoch in range(3):
        wanted = stage.epoch(epoch)
        assert [content(item) for item in read(supply, wanted)] == stage.expected(supply, wanted)
        supply.commit("reader", Position(epoch + 1, 0, wanted[0].row, wanted[0].id))
    kept = [row for row in range(len(LENGTHS)) if row in supply._kept]
    captured = len(stage.workers[0].captured)
    if share == 1.0:
        assert captured == len(supply._demand.groups)  # each group once
    else:
        assert captured > len(supply._demand.groups)
    assert all(is_kept(stage.prepared.sample_id(row), share) for row in kept)
    assert supply.manifest()["identity"] == fake_manifest().identity()
    supply.close()


def test_servers_that_share_a_run_capture_each_sample_once(tmp_path: Path) -> None:
    captured: list[list[int]] = []
    for part in (1, 2, 3):
        own: list[int] = []
        stage = Stage(tmp_path / str(part), own.append, keep_share=1.0, part=f"{part}/3", ahead=8)
        supply = stage.open()
        for epoch in range(2):
            mine = [p for p in stage.epoch(epoch) if server_of(p.id, 3) == part - 1]
            assert [content(item) for item in read(supply, mine)] == stage.expected(supply, mine)
        other = next(p for p in stage.epoch(0) if server_of(p.id, 3) != part - 1)
        with pytest.raises(StreamError, match=rf"samples of part {part}/3(.|\n)*serve.part"):
            supply.take([other], 10**6, WAIT_S)
        supply.close()
        captured.append(own)
    eligible = {p.row for p in stage.epoch(0)}
    assert all(len(own) == len(set(own)) for own in captured)  # nothing twice
    assert eligible <= {row for own in captured for row in own}
    assert sum(map(len, captured)) == len({row for own in captured for row in own})  # nothing by two of them


def test_a_reader_has_an_epoch_from_the_parts_of_two_servers(tmp_path: Path) -> None:
    make_files(tmp_path / "serve", [])
    secrets = Secrets(Secrets.read(ServeConfig(), tmp_path / "serve").token)
    stages = [Stage(tmp_path / str(part), part=f"{part}/2") for part in (1, 2)]
    supplies = [stage.open() for stage in stages]
    servers = [Server(supply, ServeConfig(address="127.0.0.1:0"), secrets) for supply in supplies]
    addresses = [str(server.address) for server in servers]
    wanted = stages[0].epoch(0)
    source = StreamSource(",".join(addresses), reader_config(tmp_path / "serve"))
    assert [item.row for item in source.records(wanted)] == [position.row for position in wanted]
    source.close()
    swapped = StreamSource(",".join(reversed(addresses)), reader_config(tmp_path / "serve"))
    with pytest.raises(StreamError, match=r"order of their serve\.part"):
        list(swapped.records(wanted))
    swapped.close()
    for server, supply in zip(servers, supplies, strict=True):
        server.close()
        supply.close()


def test_a_restart_goes_on_from_what_is_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=1.0)
    first = stage.open()
    read(first, stage.epoch(0))
    read(first, heldout_positions(stage.folder))
    first.close()
    supply = stage.open()
    for wanted in (stage.epoch(0), stage.epoch(1), heldout_positions(stage.folder)):
        assert [content(item) for item in read(supply, wanted)] == stage.expected(supply, wanted)
    assert stage.workers[1].captured == []
    assert supply.figures()["misses"] == 0
    supply.close()


def test_store_max_bytes_decides_the_share(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    limited = stage.cfg.model_copy(update={"store": stage.cfg.store.model_copy(update={"max_bytes": 40_000})})
    supply = stage.open(limited)
    for epoch in range(2):
        read(supply, stage.epoch(epoch))
    assert 3 < supply.figures()["kept_records"] < len(LENGTHS) - 3
    supply.close()
    assert sum(path.stat().st_size for path in (stage.folder.states / "shards").iterdir()) < 40_000


def test_what_was_released_is_captured_again_with_equal_bytes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0, ahead=0)
    supply = stage.open()
    wanted = stage.epoch(0)
    first = [content(item) for item in read(supply, wanted)]
    supply.commit("reader", wanted[-1])
    captured = len(stage.workers[0].captured)
    assert supply.figures()["ring_records"] <= 1
    assert [content(item) for item in read(supply, wanted)] == first
    assert len(stage.workers[0].captured) > captured
    supply.close()


def test_asking_again_before_release_captures_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0, ahead=0)
    supply = stage.open()
    wanted = stage.epoch(0)
    first = [content(item) for item in read(supply, wanted)]
    captured = list(stage.workers[0].captured)
    assert [content(item) for item in read(supply, wanted)] == first
    assert stage.workers[0].captured == captured
    supply.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_captures_and_deaths_with_a_tiny_ring_serves_all_readers(tmp_path: Path, seed: int) -> None:
    """Three workers, late and dying at random; three readers at their own pace; a ring smaller than some records."""
    rng, lock = random.Random(seed), threading.Lock()

    def act(row: int) -> None:
        with lock:
            late, dies = rng.random() * 0.004, rng.random() < 0.05
        time.sleep(late)
        if dies:
            raise WorkerDied("a worker", "it died on purpose", "")

    stage = Stage(
        tmp_path, act, workers=3, keep_share=[0.0, 0.4][seed % 2], ring_bytes=2500, ahead=[0, 4, 100][seed % 3]
    )
    supply = stage.open()
    wanted = [stage.epoch(0), stage.epoch(0)[::2], stage.epoch(1)]
    found: list[list[Any]] = [[], [], []]
    over: list[float] = []

    def reader(k: int) -> None:
        found[k] = read(supply, wanted[k], at_once=1 + k, max_bytes=3000)

    threads = [threading.Thread(target=reader, args=(k,), daemon=True) for k in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with supply._changed:
            over.append(0 if len(supply._ring) == 1 else supply._ring.num_bytes)
        time.sleep(0.001)
    assert max(over) <= 2500
    for k in range(3):
        assert [content(item) for item in found[k]] == stage.expected(supply, wanted[k])
    assert supply.figures()["worker_deaths"] > 0
    supply.close()


def test_captures_run_ahead_of_the_reader_within_the_ring(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0, ring_bytes=12_000)
    supply = stage.open()
    wanted = stage.epoch(0)
    assert supply.take(wanted[:1], 10**6, 10)
    deadline = time.monotonic() + 10
    while supply.figures()["ring_bytes"] < 8_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    figures = supply.figures()
    assert 8_000 <= figures["ring_bytes"] <= 12_000
    assert figures["dropped"] == 0
    captured = len(stage.workers[0].captured)
    time.sleep(0.3)
    assert len(stage.workers[0].captured) == captured  # the reader stands still, and so does capture
    assert figures["capture_waited_s"] >= 0
    assert [content(item) for item in read(supply, wanted)] == stage.expected(supply, wanted)
    supply.close()


def test_a_reader_that_stands_still_keeps_none_from_going_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0, ring_bytes=6_000)
    supply = stage.open()
    wanted = stage.epoch(0)
    for k in range(20):  # each asks for much, takes one, and is never seen again
        assert supply.take(wanted[k:], 1, 10)
    supply.commit("stalled", wanted[0])
    later = stage.epoch(1)
    assert [content(item) for item in read(supply, later)] == stage.expected(supply, later)
    supply.close()


def test_take_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda row: time.sleep(0.5), keep_share=0.0)
    supply = stage.open()
    wanted = stage.epoch(0)
    began = time.monotonic()
    assert supply.take(wanted[:3], 10**6, 0.1) == []
    assert time.monotonic() - began < 0.45
    found = supply.take(wanted[:3], 10**6, 20)
    assert [content(item) for item in found] == stage.expected(supply, wanted[: len(found)])
    figures = supply.figures()
    assert figures["misses"] == 1
    assert figures["hits"] == len(found) - 1
    supply.close()


def test_a_reader_that_only_polls_is_served_too(tmp_path: Path) -> None:
    """As the server asks: a hint, then again and again without waiting, with a ring that holds next to nothing."""
    stage = Stage(tmp_path, keep_share=0.0, ring_bytes=1500)
    supply = stage.open()
    wanted = stage.epoch(0)
    found: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < len(wanted) and time.monotonic() < deadline:
        supply.want(wanted[len(found) : len(found) + 6])
        while not (items := supply.take(wanted[len(found) : len(found) + 6], 10**6, 0.0)):
            time.sleep(0.002)
        found += items
    assert [content(item) for item in found] == stage.expected(supply, wanted)
    assert supply.figures()["misses"] > 0
    supply.close()


def test_a_rollback_captures_each_group_once_more(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0, ahead=0)
    supply = stage.open()
    for wanted in (stage.epoch(0), stage.epoch(1)):
        read(supply, wanted, at_once=2)
        supply.commit("trainer", Position(wanted[0].epoch + 1, 0, wanted[0].row, wanted[0].id))
    once = len(stage.workers[0].captured)
    read(supply, stage.epoch(0), at_once=2)  # from the first checkpoint again
    read(supply, stage.epoch(1), at_once=2)
    assert len(stage.workers[0].captured) == 2 * once
    supply.close()


def test_take_gives_a_prefix_within_the_bytes_or_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=1.0)
    supply = stage.open()
    wanted = stage.epoch(0)
    read(supply, wanted)
    assert len(supply.take(wanted, 1, 1)) == 1
    found = supply.take(wanted, 3000, 1)
    assert 1 < len(found) < len(wanted)
    assert sum(item.num_bytes for item in found if isinstance(item, Record)) <= 3000
    assert supply.take([], 1, 1) == []
    supply.close()


def test_a_sample_that_fails_twice_is_a_hole_that_stays(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0)
    tolerant = stage.cfg.model_copy(update={"capture": stage.cfg.capture.model_copy(update={"tolerate_failures": 0.1})})
    supply = stage.open(tolerant)
    wanted = stage.epoch(0)
    bad = wanted[4].row
    stage.workers[0].broken = {bad}
    found = read(supply, wanted)
    assert found[4] == Hole(bad, wanted[4].id, "not finite")
    assert sum(isinstance(item, Hole) for item in found) == 1
    assert supply.holes() == {bad: found[4]}
    supply.close()
    again = stage.open(tolerant)
    assert [item for item in read(again, stage.epoch(1)) if isinstance(item, Hole)] == [found[4]]
    assert again.figures()["holes"] == 1
    again.close()


def test_too_many_holes_stop_the_run_with_the_last_lines(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=0.0)
    supply = stage.open()
    stage.workers[0].broken = set(range(len(LENGTHS)))
    with pytest.raises(CaptureError, match=r"at most 1\.0%(.|\n)*the last line"):
        read(supply, stage.epoch(0))
    with pytest.raises(CaptureError):
        supply.want(stage.epoch(0))
    assert isinstance(supply.failed, CaptureError)
    supply.close()


def test_an_error_of_a_worker_reaches_the_readers(tmp_path: Path) -> None:
    def act(row: int) -> None:
        raise StreamError("a worker that stays alive", "9 deaths", "see its log")

    stage = Stage(tmp_path, act)
    supply = stage.open()
    with pytest.raises(StreamError, match="9 deaths"):
        supply.take(stage.epoch(0), 1000, 10)
    supply.close()


def test_positions_of_another_set_are_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    supply = stage.open()
    own = stage.epoch(0)[0]
    for wrong in (Position(0, 0, own.row, bytes(16)), Position(0, 0, 10**6, own.id), Position(-1, 0, own.row, own.id)):
        with pytest.raises(StreamError, match="positions of the prepared set"):
            supply.take([wrong], 1000, 1)
    supply.close()
    supply.close()
    with pytest.raises(StreamError, match="closed"):
        supply.take([own], 1000, 1)


def test_positions_outside_the_order_are_served_too(tmp_path: Path) -> None:
    """Held-out rows, and rows asked for under a place that is not theirs in this order."""
    stage = Stage(tmp_path, keep_share=0.0)
    supply = stage.open()
    odd = [Position(0, place, row, stage.prepared.sample_id(row)) for place, row in enumerate(range(10))]
    for wanted in (heldout_positions(stage.folder), odd):
        assert [content(item) for item in read(supply, wanted)] == stage.expected(supply, wanted)
    supply.close()


@pytest.mark.parametrize(
    ("section", "setting"), [("target", {"engine": "vllm"}), ("store", {"at": "s3://bucket/states"})]
)
def test_what_is_not_captured_here_is_refused(tmp_path: Path, section: str, setting: dict[str, str]) -> None:
    stage = Stage(tmp_path)
    changed = {section: getattr(stage.cfg, section).model_copy(update=setting)}
    with pytest.raises(ConfigError, match="to capture on demand"):
        stage.open(stage.cfg.model_copy(update=changed))
    assert stage.workers == []


def test_a_ring_that_holds_less_than_a_window_is_told_of(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ring_bytes=500)
    stage.open().close()
    assert any("serve.ring_bytes 500 is less than" in note for note in stage.notes.told)


def test_a_worker_that_cannot_open_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)

    def fails(_: Made) -> Manifest:
        raise StreamError("a worker that stays alive", "it does not", "see its log")

    monkeypatch.setattr(Made, "open", fails)
    with pytest.raises(StreamError):
        stage.open()
    assert stage.workers[0].closed
    monkeypatch.undo()
    stage.open().close()


def test_a_damaged_kept_record_is_captured_again_with_its_group(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep_share=1.0)
    first = stage.open()
    wanted = stage.epoch(0)
    expected = [content(item) for item in read(first, wanted)]
    first.close()
    bad = wanted[7].row
    spoil(stage.folder.states, bad)
    supply = stage.open()
    found = read(supply, wanted)
    assert [content(item) for item in found] == expected
    generations = {item.row: item.generation for item in found if isinstance(item, Record)}
    assert [row for row, generation in generations.items() if generation > 1] == [bad]
    assert len(stage.workers[1].captured) == 1
    assert supply.figures()["damaged"] == 1
    supply.close()
    again = stage.open()
    assert [content(item) for item in read(again, wanted)] == expected
    assert stage.workers[2].captured == []
    again.close()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_stays_within_the_ring_whatever_the_reader_does(tmp_path: Path) -> None:
    """400 MB on offer, a ring of 32 MB, a reader that stands still and then goes on."""
    lengths, bound, spare = [32_000] * 200, 32 * 2**20, 128 * 2**20
    stage = Stage(tmp_path, lengths=lengths, keep_share=0.0, ring_bytes=bound)
    supply = stage.open()
    wanted = stage.epoch(0)
    supply.take(wanted[:1], 1, WAIT_S)
    before = most = rss_bytes()
    time.sleep(1.0)
    for position in wanted:
        assert supply.take([position], 1, WAIT_S)
        most = max(most, rss_bytes())
    assert most - before < bound + spare
    assert supply.figures()["produced_bytes"] > 300e6
    supply.close()
