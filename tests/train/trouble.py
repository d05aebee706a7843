"""Troubles that a rank of a test meets: killed, stopped, a source that stalls or is slow, an error of its own, a
checkpoint that is torn as it is written."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import StoreError
from headrace.progress import Silent
from headrace.record import Record
from headrace.source import Hole, Position
from headrace.store.folder_source import FolderSource
from headrace.train import loop
from headrace.train.checkpoint import Checkpoint

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


def plant(plan: dict[str, Any], rank: int) -> Silent:
    """Plan: `rank` (None: every rank), `what`, and `at`: which step, record or save of this start meets it.

    `what`: kill, stop, terminate (at a step); stall, slow (`seconds`), error (at a record); save (torn, then killed).
    `then`: a step at which SIGTERM comes as well.
    """
    if plan and plan["rank"] in (rank, None):
        if plan["what"] in SIGNALS:
            _signal_at(plan["at"], SIGNALS[plan["what"]])
        elif plan["what"] == "save":
            _tear_save(plan["at"])
        else:
            _spoil_source(plan)
        if "then" in plan:
            _signal_at(plan["then"], signal.SIGTERM)
    return Silent()


def _spoil_source(plan: dict[str, Any]) -> None:
    real = FolderSource.records
    seen = 0

    def records(self: FolderSource, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        nonlocal seen
        for item in real(self, positions):
            seen += 1
            if plan["what"] == "slow" or seen == plan["at"]:
                if plan["what"] == "error":
                    raise StoreError("a disk that answers", "none", "look at the disk")
                time.sleep(plan["seconds"])
            yield item

    FolderSource.records = records  # type: ignore[method-assign]


def _signal_at(at: int, number: signal.Signals) -> None:
    real = loop.take_step
    taken = 0

    def take_step(*given: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == at:
            os.kill(os.getpid(), number)
        return real(*given)

    loop.take_step = take_step


def _tear_save(at: int) -> None:
    real = loop.save_checkpoint
    saved = 0

    def save_checkpoint(folder: Path, checkpoint: Checkpoint, best: bool) -> Path:
        nonlocal saved
        saved += 1
        if saved == at:
            half = folder / f"step-{checkpoint.state.step:08d}.tmp"
            half.mkdir(parents=True)
            (half / "model.safetensors").write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(folder, checkpoint, best)

    loop.save_checkpoint = save_checkpoint
