"""States encoded again are those a capture would have encoded; what is there is kept, what failed stays failed."""

from pathlib import Path

import pytest

from headrace.codec.registry import open_codec
from headrace.config import RunFile, RunFolder, StoreConfig
from headrace.errors import CodecError, ConfigError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.store.merge import merge
from headrace.store.reader import StoreReader
from headrace.store.remote import open_reader
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.loop import train
from headrace.transcode import transcode
from tests.train.runs import make_run, run_file, states_of


@pytest.fixture
def source(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "raw", save_tiny_target(tmp_path / "target"), num_samples=14, changed={3: None})


def check_encoded(prepared: PreparedSet, reader: StoreReader) -> None:
    codec = open_codec(reader.manifest.codec, reader.root)
    assert reader.failures[3].permanent
    for row in reader.rows.tolist():
        sample = prepared.sample(row)
        record = reader.read(row, sample.id)
        assert b"".join(s.payload for s in record.segments) == codec.encode(states_of(sample))


def test_every_record_is_what_its_states_encode_to(source: RunFolder, tmp_path: Path) -> None:
    to = RunFolder(tmp_path / "rotated")
    summary = transcode(RunFile(), source, to, "rotated:6", Silent())
    assert summary["num_records"] == 13
    assert summary["num_failed"] == 1
    assert summary["bytes_stored"] < summary["bytes_raw"]
    prepared, reader = PreparedSet.open(to.prepared), StoreReader(to.states)
    check_encoded(prepared, reader)
    assert StoreReader(source.states).manifest.identity()["target"] == reader.manifest.identity()["target"]


def test_a_run_trains_on_what_was_transcoded(source: RunFolder, tmp_path: Path) -> None:
    to = RunFolder(tmp_path / "fp8")
    transcode(RunFile(), source, to, "fp8", Silent())
    assert transcode(RunFile(), source, to, "fp8", Silent())["num_records"] == 13
    summary = train(run_file(to.root, tmp_path / "target", max_steps=2), to, True, Silent())
    assert summary["num_steps"] == 2


def test_a_killed_transcoding_goes_on(source: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    transcode(RunFile(), source, whole, "rotated:8", Silent())

    class Dies(Silent):
        def advance(self, done: float, **figures: float) -> None:
            if done == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transcode(RunFile(), source, cut, "rotated:8", Dies())
    assert transcode(RunFile(), source, cut, "rotated:8", Silent())["num_records"] == 13
    prepared = PreparedSet.open(whole.prepared)
    a, b = StoreReader(whole.states), StoreReader(cut.states)
    for row in a.rows.tolist():
        ids = prepared.sample_id(row)
        mine, theirs = a.read(row, ids), b.read(row, ids)
        assert [s.payload for s in mine.segments] == [s.payload for s in theirs.segments]


def test_encoded_states_and_the_same_folder_are_refused(source: RunFolder, tmp_path: Path) -> None:
    to = RunFolder(tmp_path / "rotated")
    transcode(RunFile(), source, to, "rotated:6", Silent())
    with pytest.raises(CodecError, match="raw run"):
        transcode(RunFile(), to, RunFolder(tmp_path / "again"), "fp8", Silent())
    with pytest.raises(CodecError, match="another run folder"):
        transcode(RunFile(), source, RunFolder(tmp_path / "raw" / ".." / "raw"), "fp8", Silent())


def test_states_come_from_an_address_and_go_to_one(
    source: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw, encoded = (f"memory://{tmp_path}/{name}" for name in ("raw", "encoded"))
    merge([source.states], raw, 1 << 20, 60.0)
    far = RunFile(store=StoreConfig(at=raw))
    (source.states / "manifest.json").unlink()  # nothing is read there any more
    here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    summary = transcode(far, source, here, "rotated:6", Silent())
    assert transcode(far, source, there, "rotated:6", Silent(), encoded) == summary
    assert (summary["num_records"], summary["num_failed"]) == (13, 1)
    assert list((there.states / "shards").iterdir()) == []
    prepared = PreparedSet.open(there.prepared)
    for reader in (StoreReader(here.states), open_reader(encoded)):
        check_encoded(prepared, reader)
    with pytest.raises(ConfigError, match="the same at"):
        transcode(far, source, there, "rotated:6", Silent())
    config = run_file(there.root, tmp_path / "target", max_steps=2)
    at = config.model_copy(update={"store": StoreConfig(at=encoded)})
    assert train(at, there, True, Silent())["num_steps"] == 2
