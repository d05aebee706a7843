import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError, StreamError
from headrace.order import CaptureGroup, capture_groups
from headrace.prepare.prepared import PreparedSet
from headrace.record import Record
from headrace.stream import worker as module
from headrace.stream.worker import Failed, WorkerDied, WorkerProcess
from headrace.testing.states import fake_manifest
from tests.stream.filling import LENGTHS, content, new_run, offline, tiny_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFolder]:
    return new_run(tiny, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def worker(run: tuple[RunFile, RunFolder]) -> Iterator[WorkerProcess]:
    cfg, folder = run
    own = WorkerProcess(cfg, folder, folder.root / "worker.log", 60)  # one for all: a start takes seconds
    yield own
    own.close()


def groups(run: tuple[RunFile, RunFolder]) -> list[CaptureGroup]:
    cfg, folder = run
    lengths = PreparedSet.open(folder.prepared).lengths
    return capture_groups(lengths, cfg.order.window_samples, cfg.capture.group_tokens)


def test_records_are_those_of_an_offline_capture(
    run: tuple[RunFile, RunFolder], worker: WorkerProcess, tmp_path: Path
) -> None:
    expected = offline(*run, tmp_path / "offline")
    manifest = worker.open()
    assert manifest.taps == ("after_block:0", "after_block:2")
    found: dict[int, Record | Failed] = {}
    for group in groups(run):
        found |= {item.row: item for item in worker.capture(group, group.rows[::2], 7)}
    assert sorted(found) == sorted(row for group in groups(run) for row in group.rows[::2])
    for row, item in found.items():
        assert isinstance(item, Record)
        assert item.generation == 7
        assert content(item) == expected[row]


def test_a_killed_worker_is_started_again(run: tuple[RunFile, RunFolder], worker: WorkerProcess) -> None:
    group = groups(run)[0]
    first, starts = [content(item) for item in worker.capture(group, group.rows, 1)], worker.num_starts
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="exit code -9"):
        list(worker.capture(group, group.rows, 1))
    assert [content(item) for item in worker.capture(group, group.rows, 1)] == first
    assert worker.num_starts == starts + 1


def test_a_worker_that_hangs_counts_as_dead(
    run: tuple[RunFile, RunFolder], worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups(run)[0]
    assert list(worker.capture(group, group.rows, 1))
    monkeypatch.setattr(worker, "_timeout_s", 1.0)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="no answer in 1 s"):
        list(worker.capture(group, group.rows, 1))


def test_a_worker_that_keeps_dying_stops_with_its_last_lines(
    run: tuple[RunFile, RunFolder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg, folder = run
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of memory on purpose >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(broken))
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    own = WorkerProcess(cfg, folder, folder.root / "worker.log", 60)
    with pytest.raises(StreamError, match=r"3 deaths in a row(.|\n)*out of memory on purpose"):
        own.open()
    own.close()


@pytest.mark.slow
def test_an_error_of_the_worker_itself_is_told_as_it_is(run: tuple[RunFile, RunFolder]) -> None:
    cfg, folder = run
    wrong = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"window": 4})})
    own = WorkerProcess(wrong, folder, folder.root / "worker.log", 60)
    with pytest.raises(ConfigError, match=r"capture\.tokens needed"):
        own.open()
    own.close()


def test_the_worker_ends_with_its_parent(run: tuple[RunFile, RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, folder = run
    own = WorkerProcess(cfg, folder, folder.root / "orphan.log", 60)
    monkeypatch.setattr(own, "_send", lambda message: None)  # it waits for its run, with nothing loaded
    monkeypatch.setattr(own, "_answer", lambda: {"manifest": fake_manifest().to_text()})
    own.open()
    process = own._process
    assert process is not None
    assert process.stdin is not None
    assert process.poll() is None
    process.stdin.close()  # what the kernel does when this process dies
    assert process.wait(30) == 1
    own.close()


def test_a_closed_worker_starts_no_more(run: tuple[RunFile, RunFolder]) -> None:
    cfg, folder = run
    own = WorkerProcess(cfg, folder, folder.root / "closed.log", 60)
    own.close()
    group = groups(run)[0]
    with pytest.raises(WorkerDied):
        list(own.capture(group, group.rows, 1))


def test_there_is_more_than_one_group(run: tuple[RunFile, RunFolder]) -> None:
    assert len(groups(run)) > len(LENGTHS) // 5
