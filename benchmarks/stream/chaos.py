"""Whatever dies, a training run over a stream ends with the weights of one that nothing disturbed.

In: a folder, how many troubles of each kind. Out: rows of claims, as JSON. The tiny target, captured on demand by a
real `headrace serve` (nothing kept, a small ring, so that every epoch is captured), a relay, and a real trainer, all in
processes of their own. Before every few positions the trainer waits until the next trouble has been made: so each of
them meets a run that is under way. What a trainer's source gives is written down by a wrapper around it; the surviving
lineage is what each start read, up to the position where the next one went on.

usage: chaos.py FOLDER TIMES | chaos.py train RUN.yaml JOURNAL EVERY TROUBLES
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))

from tests.stream.filling import new_run, offline, positions, tiny_target  # noqa: E402

from headrace.config import RunFile, RunFolder, load_run_file  # noqa: E402
from headrace.progress import Silent  # noqa: E402
from headrace.record import Record  # noqa: E402
from headrace.source import Hole, Position  # noqa: E402
from headrace.stream.client import StreamSource  # noqa: E402
from headrace.stream.secrets import TOKEN, make_files  # noqa: E402
from headrace.testing.relay import Relay  # noqa: E402
from headrace.train import assemble  # noqa: E402
from headrace.train.checkpoint import load_checkpoint  # noqa: E402
from headrace.train.loop import train  # noqa: E402

LENGTHS = [10 + (7 * n) % 15 for n in range(80)]
NUM_TRAINED = sum(k % 4 != 0 for k in range(len(LENGTHS)))  # the others are held out
EVERY = 7  # positions between troubles
EPOCHS = 4
STALL_S, PAUSE_S = 5.0, 3.0
LIMIT_S = 900.0
KINDS = (
    "server killed", "engine killed", "trainer killed", "connection cut", "5 s stall", "server stopped (SIGSTOP)",
    "bit turned in a payload", "bit turned in framing",
)  # fmt: skip
TRAIN = {"epochs": EPOCHS, "step_tokens": 96, "micro_tokens": 48, "anchors": 4, "autocast": False, "threads": 1,
         "eval_samples": 2, "save_seconds": 1e-6, "tensorboard": False}  # fmt: skip
DRAFTER = {"num_layers": 1, "block_size": 4, "mask_token_id": 63, "num_heads": 2, "num_kv_heads": 1}


class Noted(StreamSource):
    """Writes down what it gives in the order of an epoch, and waits before some of it."""

    journal: Path
    every: int
    troubles: int
    passes = 0  # over positions of an epoch; the first one takes the scale of taps, and trains nothing

    def records(self, asked: Iterable[Position]) -> Iterator[Record | Hole]:
        """As StreamSource."""
        known = list(asked)
        self.passes += known[0].place >= 0
        for position, item in zip(known, super().records(known), strict=True):
            if position.place >= 0:
                self._note(position, item)
            yield item

    def _note(self, position: Position, item: Record | Hole) -> None:
        with open(self.journal, "a", encoding="utf-8") as file:
            told = [os.getpid(), self.passes, position.epoch, position.place, item.row, isinstance(item, Hole)]
            file.write(json.dumps(told) + "\n")
        number, rest = divmod(
            position.epoch * sum(k % 4 != 0 for k in range(len(LENGTHS))) + position.place, self.every
        )
        if rest == 0 and 0 < number <= self.troubles:
            made = self.journal.with_name(f"trouble-{number - 1}")
            made.touch()
            while not made.with_suffix(".made").exists():
                time.sleep(0.01)


def run_trainer(file: Path, journal: Path, every: int, troubles: int) -> None:
    """A trainer, as `headrace train`, with a source that takes notes."""
    cfg = load_run_file(file).run
    Noted.journal, Noted.every, Noted.troubles = journal, every, troubles
    assemble.StreamSource = Noted  # type: ignore[misc]
    train(cfg, RunFolder(Path(cfg.run)), True, Silent())


@dataclass
class Play:
    """The processes of one run, and what is done to them."""

    root: Path
    run: RunFile
    port: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_server(self) -> None:
        """At the same port always."""
        command = [
            sys.executable,
            "-c",
            "from headrace.cli.main import app; app()",
            "serve",
            str(self.root / "serve.yaml"),
        ]
        with open(self.root / "serve.log", "ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log)
        self.started.append(self.server)

    def start_trainer(self, troubles: int) -> None:
        """It goes on from its last checkpoint."""
        command = [sys.executable, __file__, "train", str(self.root / "train.yaml"), str(self.root / "journal.jsonl")]
        with open(self.root / "train.log", "ab") as log:
            self.trainer = subprocess.Popen([*command, str(EVERY), str(troubles)], stdout=log, stderr=log)
        self.started.append(self.trainer)

    def engine(self) -> int | None:
        """Process id of the server's target."""
        found = subprocess.run(["pgrep", "-P", str(self.server.pid)], stdout=subprocess.PIPE, text=True, check=False)
        return int(found.stdout.split()[0]) if found.stdout.split() else None

    def make(self, kind: str, relay: Relay, troubles: int) -> None:
        """One trouble; what it needs to go on is started, and not waited for."""
        match kind:
            case "server killed":
                self.server.kill()
                self.server.wait()
                self.start_server()
            case "engine killed":
                _wait_until(lambda: self.engine() is not None)
                os.kill(self.engine() or 0, signal.SIGKILL)
            case "trainer killed":
                self.trainer.kill()
                self.trainer.wait()
                self.start_trainer(troubles)
            case "connection cut":
                relay.cut()
            case "5 s stall":
                relay.stall(STALL_S)
            case "server stopped (SIGSTOP)":
                stopped = self.server
                stopped.send_signal(signal.SIGSTOP)
                threading.Timer(PAUSE_S, stopped.send_signal, [signal.SIGCONT]).start()
            case _:
                _wait_until(lambda: relay.num_damaged == self.damages)  # the last one has been met
                relay.damage("payload" if "payload" in kind else "framing")
                self.damages += 1

    damages: int = 0

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            process.kill()
            process.wait()


def _wait_until(holds: Any) -> None:
    end = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def settings(root: Path) -> tuple[RunFile, RunFolder, int]:
    """Run files of both sides, a prepared set for both, and the port of the server."""
    cfg, folder = new_run(tiny_target(root / "tiny"), root / "served", LENGTHS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    make_files(root / "files", [])
    token = str(root / "files" / TOKEN)
    serve = {"address": f"127.0.0.1:{port}", "token_file": token, "keep_share": 0.0, "ring_bytes": 60_000, "ahead": 8}
    base = {**cfg.model_dump(mode="json"), "train": TRAIN, "drafter": DRAFTER, "floor": False}
    (root / "serve.yaml").write_text(yaml.safe_dump({**base, "serve": serve}))
    return RunFile.model_validate(base), folder, port


def disturbed(root: Path, cfg: RunFile, folder: RunFolder, port: int, times: int) -> dict[str, int]:
    """Train through all troubles. Returns: how often each was made."""
    shutil.copytree(folder.prepared, root / "there" / "prepared")
    relay = Relay(port)
    stream = {"token_file": str(root / "files" / TOKEN), "request_bytes": 8_000, "read_ahead_bytes": 24_000,
              "silence_s": 2.0, "give_up_s": 120.0}  # fmt: skip
    there = {"run": str(root / "there"), "source": f"grpc://127.0.0.1:{relay.port}", "stream": stream}
    (root / "train.yaml").write_text(yaml.safe_dump({**cfg.model_dump(mode="json"), **there}))
    kinds = [kind for kind in KINDS for _ in range(times)]
    random.Random(0).shuffle(kinds)
    play = Play(root, cfg, port)
    made: dict[str, int] = dict.fromkeys(KINDS, 0)
    end = time.monotonic() + LIMIT_S
    try:
        play.start_server()
        play.start_trainer(len(kinds))
        while play.trainer.poll() is None and time.monotonic() < end:
            number = sum(made.values())
            wanted = root / f"trouble-{number}"
            if number < len(kinds) and wanted.exists():
                play.make(kinds[number], relay, len(kinds))
                made[kinds[number]] += 1
                wanted.with_suffix(".made").touch()
            time.sleep(0.01)
        assert play.trainer.returncode == 0, f"see {root / 'train.log'} and {root / 'serve.log'}"
    finally:
        play.close()
        relay.close()
    return made


def lineage(journal: Path) -> tuple[list[tuple[int, int, int]], int, int]:
    """(epoch, place, row) of what survives, in the order it was read; holes; starts of a trainer."""
    kept: list[tuple[int, int, int]] = []
    holes, process, starts = 0, None, 0
    for own, number, epoch, place, row, hole in map(json.loads, journal.read_text().splitlines()):
        if number == 1:
            continue
        if own != process:
            process, starts = own, starts + 1
            kept = [entry for entry in kept if entry[:2] < (epoch, place)]
        kept.append((epoch, place, row))
        holes += hole
    return kept, holes, starts


def main(root: Path, times: int) -> None:
    """Measure all."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    began = time.monotonic()
    cfg, folder, port = settings(root)
    made = disturbed(root, cfg, folder, port, times)
    seconds = time.monotonic() - began
    whole = RunFolder(root / "offline")
    offline(cfg, folder, whole.root)
    train(cfg.model_copy(update={"run": str(whole.root)}), whole, True, Silent())
    mine, theirs = (load_checkpoint(own.train() / "last") for own in (whole, RunFolder(root / "there")))
    found, holes, starts = lineage(root / "journal.jsonl")
    wanted = [(p.epoch, p.place, p.row) for epoch in range(EPOCHS) for p in positions(cfg, folder, epoch)]
    same = mine.weights.keys() == theirs.weights.keys() and all(
        mine.weights[name].equal(theirs.weights[name]) for name in mine.weights
    )
    told = ", ".join(f"{kind} {number}" for kind, number in made.items())
    enough, in_order = min(made.values()) >= times, found == wanted
    order = f"{len(found)} of {len(wanted)}, {'in order' if in_order else 'NOT in order'}; {starts} trainers"
    num_holes = holes + len(theirs.state.holes)
    rows = [
        ("chaos: troubles made", f"{times} of each of {len(KINDS)} kinds", f"{told}; {seconds:.0f} s", enough),
        (
            f"chaos: positions of {EPOCHS} epochs in the surviving lineage",
            "every one once, in the order of an undisturbed run",
            order,
            in_order,
        ),
        ("chaos: holes", "0", str(num_holes), num_holes == 0),
        ("chaos: final weights beside a run from the folder", "equal to the bit", "equal" if same else "not", same),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        run_trainer(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
