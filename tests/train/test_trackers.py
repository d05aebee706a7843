import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.errors import TrainError
from headrace.progress import Silent
from headrace.train.metrics import MetricsLog
from headrace.train.trackers import KINDS, Trackers

SETTINGS = {"train.lr": 1e-3, "prepared": "p-1"}


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


class Run:
    """The calls of a tracker's run; `broken` makes it raise."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls, self.broken = calls, False

    def log(self, figures: dict[str, Any], step: int) -> None:
        if self.broken:
            raise ConnectionError("no route")
        self.calls.append(("log", step, figures))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules with the functions that are used, called as their own documentation says."""
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in KINDS}
    runs = {name: Run(calls[name]) for name in KINDS}
    wandb, trackio, mlflow = ModuleType("wandb"), ModuleType("trackio"), ModuleType("mlflow")

    class Error(Exception):
        pass

    def wandb_init(*, project: str, name: str, id: str, resume: str, config: dict[str, Any], dir: str) -> Run:
        calls["wandb"].append(("init", project, name, id, resume, config))
        return runs["wandb"]

    def trackio_init(project: str, name: str, *, config: dict[str, Any], resume: str, embed: bool) -> Run:
        calls["trackio"].append(("init", project, name, resume, config))
        return runs["trackio"]

    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        calls["mlflow"].append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r-17"))

    wandb.init, wandb.errors = wandb_init, SimpleNamespace(Error=Error)  # type: ignore[attr-defined]
    trackio.init = trackio_init  # type: ignore[attr-defined]
    mlflow.exceptions = SimpleNamespace(MlflowException=Error)  # type: ignore[attr-defined]
    mlflow.set_experiment = lambda name: calls["mlflow"].append(("experiment", name))  # type: ignore[attr-defined]
    mlflow.start_run = start_run  # type: ignore[attr-defined]
    mlflow.log_params = lambda params: calls["mlflow"].append(("params", params))  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda metrics, step: runs["mlflow"].log(metrics, step)  # type: ignore[attr-defined]
    mlflow.end_run = runs["mlflow"].finish  # type: ignore[attr-defined]
    for module in (wandb, trackio, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return {"calls": calls, "runs": runs}


def test_every_tracker_gets_the_figures_of_metrics_jsonl(tmp_path: Path, fakes: dict[str, Any]) -> None:
    trackers = Trackers(list(KINDS), tmp_path / "demo" / "train", SETTINGS, Silent())
    with MetricsLog(tmp_path / "demo" / "train", 0, False, trackers) as log:
        log.write(1, loss=2.5, tau=None)
        log.write(2, loss=2.0, tau=1.5)
    for name in KINDS:
        logged = [call for call in fakes["calls"][name] if call[0] == "log"]
        assert logged == [("log", 1, {"loss": 2.5}), ("log", 2, {"loss": 2.0, "tau": 1.5})]
        assert fakes["calls"][name][-1] == ("finish",)
    assert fakes["calls"]["wandb"][0][1:3] == ("headrace", "demo/train")
    assert ("params", {"train.lr": "0.001", "prepared": "p-1"}) in fakes["calls"]["mlflow"]


def test_a_resumed_run_goes_on_in_the_same_place(tmp_path: Path, fakes: dict[str, Any]) -> None:
    for _ in range(2):
        Trackers(list(KINDS), tmp_path, SETTINGS, Silent()).close()
    first, second = (call for call in fakes["calls"]["wandb"] if call[0] == "init")
    assert first == second
    assert first[4] == "allow"
    assert [call for call in fakes["calls"]["mlflow"] if call[0] == "start"] == [
        ("start", None, f"{tmp_path.parent.name}/{tmp_path.name}"),
        ("start", "r-17", None),
    ]


def test_a_tracker_that_cannot_be_reached_is_given_up_and_the_run_goes_on(
    tmp_path: Path, fakes: dict[str, Any]
) -> None:
    told = Told()
    trackers = Trackers(["mlflow", "trackio"], tmp_path, SETTINGS, told)
    fakes["runs"]["mlflow"].broken = True
    trackers.write(1, {"loss": 1.0})
    trackers.write(2, {"loss": 0.5})
    trackers.close()
    assert len(told.notes) == 1
    assert "mlflow is given up" in told.notes[0]
    assert [call for call in fakes["calls"]["trackio"] if call[0] == "log"][-1] == ("log", 2, {"loss": 0.5})


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainError, match=r"pip install wandb"):
        Trackers(["wandb"], tmp_path, SETTINGS, Silent())


def test_nothing_is_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KINDS:
        monkeypatch.setitem(sys.modules, name, None)
    Trackers([], tmp_path, SETTINGS, Silent()).close()
