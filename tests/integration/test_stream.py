import shutil
import threading
from pathlib import Path

import pytest
import torch

from headrace.config import RunFile, RunFolder, StreamConfig
from headrace.files import read_stage
from headrace.progress import Silent
from headrace.testing.relay import Relay
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.checkpoint import load_checkpoint
from headrace.train.loop import train
from tests.stream.serving import ServerProcess, reader_config
from tests.train.runs import make_run, run_file
from tests.train.test_loop import assert_same


class Troubled(Silent):
    """Disturbs the link or the server at steps of a run."""

    def __init__(self, relay: Relay, server: ServerProcess) -> None:
        self.relay, self.server, self.done = relay, server, 0

    def advance(self, done: int, **figures: float | int | str) -> None:
        if done in (2, 6):
            self.relay.cut()
        elif done == 4:
            self.server.kill()
            threading.Timer(0.5, self.server.start).start()
        elif done == 5:
            self.relay.damage("payload")
        self.done = done


def streamed(cfg: RunFile, port: int, serve: Path, **settings: object) -> RunFile:
    stream: StreamConfig = reader_config(serve, **settings)
    return cfg.model_copy(update={"source": f"grpc://127.0.0.1:{port}", "stream": stream})


@pytest.mark.parametrize("troubled", [False, True])
def test_a_run_over_a_stream_equals_one_from_the_folder_to_the_bit(tmp_path: Path, troubled: bool) -> None:
    target = save_tiny_target(tmp_path / "target")
    here = make_run(tmp_path / "here", target)
    torch.set_num_threads(1)
    train(run_file(here.root, target), here, True, Silent())
    there = RunFolder(tmp_path / "there")  # the trainer's machine has no states
    shutil.copytree(here.prepared, there.prepared)
    with ServerProcess(here.states, tmp_path / "serve") as server:
        relay = Relay(server.port)
        progress = Troubled(relay, server) if troubled else Silent()
        small = {"request_bytes": 20_000, "read_ahead_bytes": 60_000, "silence_s": 2.0}
        train(streamed(run_file(there.root, target), relay.port, tmp_path / "serve", **small), there, True, progress)
        assert_same(*(load_checkpoint(folder.train() / "last") for folder in (here, there)))
        mine, theirs = (read_stage(folder.train()) for folder in (here, there))
        assert mine is not None
        assert theirs is not None
        assert mine["identity"] == theirs["identity"]
        assert not there.states.exists()
        relay.close()
