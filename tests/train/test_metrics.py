import json
from pathlib import Path

from headrace.train.metrics import MetricsLog


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_figures_that_exist(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        log.write(1, loss=2.0, tau=None)
        log.write(2, loss=1.0, tau=1.5)
    assert lines(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "tau": 1.5}]


def test_a_resumed_run_takes_back_what_its_checkpoint_has_not_seen(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0, tensorboard=False) as log:
        for step in range(1, 6):
            log.write(step, loss=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as out:
        out.write('{"step": 6, "lo')
    with MetricsLog(tmp_path, 3, tensorboard=False) as log:
        log.write(4, loss=9.0)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[-1]["loss"] == 9.0


def test_a_run_from_the_start_begins_a_new_log(tmp_path: Path) -> None:
    for _ in range(2):
        with MetricsLog(tmp_path, 0, tensorboard=False) as log:
            log.write(0, tau=1.0)
    assert len(lines(tmp_path)) == 1


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0, tensorboard=True) as log:
        log.write(1, loss=2.0)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
