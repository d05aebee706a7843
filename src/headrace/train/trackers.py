"""Other places to watch a run from: Weights & Biases, MLflow, Trackio, each through its own writer.

In: the names that the run file asks for, and figures by step. Out: the same figures there. Nothing is imported unless
it is asked for; addresses and keys come from each program's own environment variables and never pass through headrace.
A tracker that fails while the run goes on is given up with a note: `metrics.jsonl` holds everything.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import TrainError
from headrace.files import write_atomic
from headrace.progress import Progress
from headrace.record import digest

PROJECT = "headrace"
Figures = Mapping[str, float | int]


class Tracker(Protocol):
    """One program; `faults` are the errors that mean it cannot be reached."""

    faults: tuple[type[Exception], ...]

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures of one step."""
        ...

    def close(self) -> None:
        """Send what is left, and end."""
        ...


class Wandb:
    """Weights & Biases; a resumed run goes on in the same place, whose name follows from the folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = _module("wandb", "wandb")
        self.faults: tuple[type[Exception], ...] = (OSError, wandb.errors.Error)
        own_id = digest(str(folder.resolve()).encode()).hex()
        self._run = wandb.init(
            project=PROJECT, name=_name(folder), id=own_id, resume="allow", config=dict(settings), dir=str(folder)
        )

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures of one step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Send what is left, and end."""
        self._run.finish()


class Mlflow:
    """MLflow; the id that its server gave is kept in `mlflow-run`, for a resumed run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._mlflow = _module("mlflow", "mlflow")
        self.faults: tuple[type[Exception], ...] = (OSError, self._mlflow.exceptions.MlflowException)
        self._mlflow.set_experiment(PROJECT)
        path = folder / "mlflow-run"
        if path.exists():
            self._mlflow.start_run(run_id=path.read_text(encoding="utf-8").strip())
            return
        run = self._mlflow.start_run(run_name=_name(folder))
        write_atomic(path, run.info.run_id + "\n")
        self._mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures of one step."""
        self._mlflow.log_metrics({name: float(value) for name, value in figures.items()}, step=step)

    def close(self) -> None:
        """Send what is left, and end."""
        self._mlflow.end_run()


class Trackio:
    """Trackio; a resumed run goes on under the same name."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        trackio = _module("trackio", "trackio")
        self.faults: tuple[type[Exception], ...] = (OSError, ValueError)
        self._run = trackio.init(
            project=PROJECT, name=_name(folder), config=dict(settings), resume="allow", embed=False
        )

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures of one step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Send what is left, and end."""
        self._run.finish()


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


class Trackers:
    """All trackers of a run; none of them can stop it."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], progress: Progress) -> None:
        """Begin. Raises: TrainError for a tracker whose package is not installed."""
        self._progress = progress
        self._own: dict[str, Tracker] = {name: KINDS[name](folder, settings) for name in names}

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures of one step everywhere."""
        for name, tracker in list(self._own.items()):
            try:
                tracker.write(step, figures)
            except tracker.faults as exc:
                self._give_up(name, exc)

    def close(self) -> None:
        """End them all."""
        for name, tracker in list(self._own.items()):
            try:
                tracker.close()
            except tracker.faults as exc:
                self._give_up(name, exc)
        self._own.clear()

    def _give_up(self, name: str, exc: Exception) -> None:
        del self._own[name]
        self._progress.note(f"train: {name} is given up for this start ({exc}); metrics.jsonl holds every figure")


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise TrainError(
            f"the package {package} for train.trackers", str(exc), f"pip install {package}, or leave it out"
        ) from exc


def _name(folder: Path) -> str:
    """The run's folder and the stage's: `demo/train`."""
    own = folder.resolve()
    return f"{own.parent.name}/{own.name}"
