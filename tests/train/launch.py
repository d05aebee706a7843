"""Ranks as real processes. One host imports everything once, then forks the ranks of each launch, one launch after the
other, and tells how each rank ended. Ranks meet through the environment, as under torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Launch:
    """A training of `size` ranks in a run's folder; `trouble`: see tests/train/trouble.py."""

    size: int
    root: str
    target: str
    train: dict[str, Any] = field(default_factory=dict)
    trouble: dict[str, Any] = field(default_factory=dict)
    features: bool = True
    limit_s: float = 90.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended: exit status (negative: the signal), stderr, seconds since the launch; `hung`: was killed."""

    status: int
    stderr: str
    seconds: float
    hung: bool


def launch(launches: list[Launch], timeout_s: float = 280.0) -> list[list[Ended]]:
    """Run launches in order in one host."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.launch"],
        cwd=PROJECT,
        env=environment,
        input=json.dumps([asdict(one) for one in launches]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    return [[Ended(**rank) for rank in ranks] for ranks in json.loads(done.stdout)]


def _host() -> None:
    import transformers.models.llama  # noqa: F401

    import headrace.store.folder_source
    import headrace.train.loop  # noqa: F401

    print(json.dumps([[asdict(rank) for rank in _run(Launch(**one))] for one in json.load(sys.stdin)]))


def _run(one: Launch) -> list[Ended]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    began = time.monotonic()
    errors = [Path(one.root).with_suffix(f".stderr-{rank}") for rank in range(one.size)]
    children = {_fork(one, rank, port, errors[rank]): rank for rank in range(one.size)}
    ended: dict[int, Ended] = {}
    hung: set[int] = set()
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            code, text = os.waitstatus_to_exitcode(status), errors[rank].read_text()
            ended[rank] = Ended(code, text, time.monotonic() - began, pid in hung)
        elif time.monotonic() - began > one.limit_s:
            stopped = one.trouble.get("what") == "stop"  # that rank cannot end by itself
            hung |= {pid for pid, rank in children.items() if not (stopped and rank == one.trouble["rank"])}
            for child in children:
                os.kill(child, signal.SIGKILL)
            one = Launch(**{**asdict(one), "limit_s": 1e9})
        elif one.trouble.get("what") == "stop" and set(children.values()) == {one.trouble["rank"]}:
            os.kill(next(iter(children)), signal.SIGKILL)
        else:
            time.sleep(0.05)
    return [ended[rank] for rank in range(one.size)]


def _fork(one: Launch, rank: int, port: str, stderr: Path) -> int:
    child = os.fork()
    if child:
        return child
    with open(stderr, "w") as out:
        os.dup2(out.fileno(), 2)
    os.dup2(2, 1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": one.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    status = 1
    try:
        status = _train(one, rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _train(one: Launch, rank: int) -> int:
    import torch

    from headrace.config import RunFolder
    from headrace.errors import HeadraceError
    from headrace.train.loop import train
    from headrace.train.ranks import joined
    from tests.train.runs import run_file
    from tests.train.trouble import plant

    torch.set_num_threads(1)
    root = Path(one.root)
    progress = plant(one.trouble, rank)
    try:
        with joined(torch.device("cpu")) as ranks:
            train(run_file(root, Path(one.target), **one.train), RunFolder(root), one.features, progress, ranks)
    except HeadraceError as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return exc.exit_code
    except SystemExit as exc:
        return int(exc.code or 0)
    return 0


if __name__ == "__main__":
    _host()
