"""A supply over a real target: what is streamed is what an offline capture stores, whatever dies meanwhile."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.config import DrafterConfig, RunFile, RunFolder, TrainConfig
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.source import Hole, Position
from headrace.stream.fill import FillSupply
from headrace.stream.secrets import TOKEN, make_files
from headrace.stream.server import Secrets, Server
from headrace.stream.worker import WorkerProcess
from headrace.train.loop import numerics, train
from tests.stream.filling import LENGTHS, WAIT_S, Notes, content, new_run, offline, positions, read, tiny_target
from tests.train.runs import TRAIN


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    """Content of every row, captured offline."""
    root = tmp_path_factory.mktemp("whole")
    cfg, folder = new_run(tiny, root / "run")
    return offline(cfg, folder, root / "offline")


def expected(whole: dict[int, tuple[Any, ...]], wanted: list[Position]) -> list[tuple[Any, ...]]:
    return [whole[position.row] for position in wanted]


def kill(supply: FillSupply) -> None:
    worker = supply._workers[0]
    assert isinstance(worker, WorkerProcess)
    deadline = time.monotonic() + WAIT_S
    while (pid := worker.pid) is None and time.monotonic() < deadline:  # it is started again
        time.sleep(0.01)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_half_kept_is_what_an_offline_capture_gives_in_the_same_order(
    tiny: Path, tmp_path: Path, whole: dict[int, tuple[Any, ...]]
) -> None:
    cfg, folder = new_run(tiny, tmp_path / "run", keep_share=0.5)
    supply = FillSupply(cfg, folder, Silent())
    for epoch in range(3):
        wanted = positions(cfg, folder, epoch)
        assert [content(item) for item in read(supply, wanted)] == expected(whole, wanted)
        supply.commit("reader", Position(epoch + 1, 0, wanted[0].row, wanted[0].id))
    assert 0 < supply.figures()["kept_records"] < len(whole)
    supply.close()
    assert (folder.root / "serve" / "worker-0.log").exists()
    assert offline(cfg, folder, folder.root) == whole  # an offline capture goes on from what was kept


def through_kills(tiny: Path, root: Path, whole: dict[int, tuple[Any, ...]], kills: int) -> None:
    """Every epoch is read while the worker is killed between and in the middle of captures; then rolled back."""
    cfg, folder = new_run(tiny, root, keep_share=0.0, ring_bytes=8000, ahead=8)
    notes = Notes()
    supply = FillSupply(cfg, folder, notes)
    killed = epoch = 0
    while killed < kills or epoch < 2:
        wanted = positions(cfg, folder, epoch)
        found: list[Any] = []
        while len(found) < len(wanted):
            found += supply.take(wanted[len(found) : len(found) + 3], 10**6, WAIT_S)
            if killed < kills and len(found) % 12 < 3 and supply.figures()["worker_deaths"] == killed:
                kill(supply)
                killed += 1
        assert [content(item) for item in found] == expected(whole, wanted)
        supply.commit("reader", wanted[-1])
        epoch += 1
    rolled_back = positions(cfg, folder, 0)
    assert [content(item) for item in read(supply, rolled_back)] == expected(whole, rolled_back)
    assert supply.holes() == {}
    assert supply.figures()["worker_deaths"] == kills
    assert any("started again after exit code -9" in note for note in notes.told)
    supply.close()


def test_a_killed_worker_costs_no_record(tiny: Path, tmp_path: Path, whole: dict[int, tuple[Any, ...]]) -> None:
    through_kills(tiny, tmp_path / "run", whole, 1)


@pytest.mark.slow
def test_a_worker_killed_many_times_costs_no_record(
    tiny: Path, tmp_path: Path, whole: dict[int, tuple[Any, ...]]
) -> None:
    through_kills(tiny, tmp_path / "run", whole, 6)


@pytest.mark.slow
def test_states_that_are_no_numbers_twice_are_a_hole(tmp_path: Path) -> None:
    cfg, folder = new_run(tmp_path / "tiny", tmp_path / "run", keep_share=0.0)
    prepared = PreparedSet.open(folder.prepared)
    once = {t: {r for r in range(prepared.num_samples) if t in prepared.sample(r).input_ids} for t in range(3, 64)}
    token, rows = min(once.items(), key=lambda pair: (len(pair[1]) == 0, len(pair[1])))
    tiny_target(tmp_path / "tiny", [token])
    supply = FillSupply(tolerant(cfg), folder, Silent())
    found = read(supply, positions(cfg, folder, 0))
    holes = {item.row for item in found if isinstance(item, Hole)}
    assert holes == {row for row in rows if not prepared.heldout[row]}
    assert holes
    supply.close()


def tolerant(cfg: RunFile) -> RunFile:
    return cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"tolerate_failures": 0.5})})


def trained(cfg: RunFile, prepared: Path, root: Path, source: str | None, token: Path) -> dict[str, torch.Tensor]:
    """Weights after three epochs, in a run folder of its own that has the prepared set (and states, if offline)."""
    own = RunFolder(root)
    if not own.prepared.exists():
        shutil.copytree(prepared, own.prepared)
    changed = {
        "run": str(root),
        "source": source,
        "stream": cfg.stream.model_copy(update={"token_file": str(token)}),
        "train": TrainConfig(**{**TRAIN, "epochs": 3}),
        "drafter": DrafterConfig(num_layers=1, block_size=4, mask_token_id=63, num_heads=2, num_kv_heads=1),
    }
    with numerics(1):
        train(cfg.model_copy(update=changed), own, True, Silent())
    return load_file(own.train() / "last" / "model.safetensors")


@pytest.mark.parametrize("share", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_offline_and_streamed_train_the_same_weights(tiny: Path, tmp_path: Path, share: float) -> None:
    """Over the wire, half of it kept or nothing, with the worker killed on the way."""
    lengths = [8 + length for length in LENGTHS]
    cfg, folder = new_run(tiny, tmp_path / "offline", lengths)
    offline(cfg, folder, folder.root)
    expected_weights = trained(cfg, folder.prepared, folder.root, None, tmp_path)
    own, served_folder = new_run(tiny, tmp_path / "served", lengths, keep_share=share)
    make_files(tmp_path / "files", [])
    supply = FillSupply(own, served_folder, Silent())
    secrets = Secrets(Secrets.read(own.serve, tmp_path / "files").token)
    server = Server(supply, own.serve.model_copy(update={"address": "127.0.0.1:0"}), secrets)
    killer = threading.Timer(0.2, kill, [supply])
    killer.start()
    source, token = f"grpc://127.0.0.1:{server.address.port}", tmp_path / "files" / TOKEN
    found = trained(own, folder.prepared, tmp_path / "trainer", source, token)
    killer.join()
    server.close()
    figures = supply.figures()
    supply.close()
    assert found.keys() == expected_weights.keys()
    assert all(torch.equal(found[name], expected_weights[name]) for name in found)
    assert figures["holes"] == 0
    assert (figures["kept_records"] > 0) == (share > 0)
