"""What a run measured, for people and programs.

In: one mapping of figures a step. Out: a line of `metrics.jsonl` each (docs/results.md names the keys), and the same
figures as TensorBoard events and to the trackers that were asked for. A resumed run first takes back the lines of steps
that its checkpoint has not seen.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.files import write_atomic
from headrace.train.trackers import Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Figure = float | int | None


class MetricsLog:
    """Appends figures; use as a context manager."""

    def __init__(self, folder: Path, step: int, tensorboard: bool, trackers: Trackers | None = None) -> None:
        """Args: step: updates the run starts from; lines after it are taken back."""
        self._trackers = trackers
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _take_back(self._path, step)
        self._events = _events(folder / "tensorboard", step) if tensorboard else None

    def write(self, step: int, **figures: Figure) -> None:
        """Add one line; figures that are None are left out."""
        present = {name: value for name, value in figures.items() if value is not None}
        with open(self._path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **present}) + "\n")
        if self._events is not None:
            for name, value in present.items():
                self._events.add_scalar(name, value, step)
        if self._trackers is not None:
            self._trackers.write(step, present)

    def close(self) -> None:
        """Flush and close the events and trackers."""
        if self._events is not None:
            self._events.close()
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoLog(MetricsLog):
    """What a rank writes that is not the first: nothing."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, **figures: Figure) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _events(folder: Path, step: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


def _take_back(path: Path, step: int) -> None:
    if not path.exists():
        return
    if step == 0:
        path.unlink()
        return
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_atomic(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
