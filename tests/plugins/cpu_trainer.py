"""Run a command in speculators' environment on a CPU, and note every figure its trainer logs.

usage: cpu_trainer.py METRICS.jsonl speculators|headrace ARGS...

speculators 0.9.0 has no CPU path: its trainer moves the model to device number 0, casts for CUDA and waits for an
accelerator. Those three things are replaced here; nothing else of it is.
"""

import json
import sys
from pathlib import Path
from typing import Any


class Noted:
    """Their metric logger, with a copy of each line."""

    def __init__(self, inner: Any, path: Path) -> None:
        self._inner, self._path = inner, path

    def info(self, line: Any, *args: Any, **kwargs: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as out:
            out.write(json.dumps(line, default=str) + "\n")
        self._inner.info(line, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def on_the_cpu(metrics: Path) -> None:
    import speculators.train.trainer as trainer
    import torch

    torch.set_num_threads(1)
    setup = trainer.Trainer.setup_trainer

    def setup_on_cpu(self: Any) -> None:
        self.device_type = "cpu"
        setup(self)

    trainer.get_local_rank = lambda: torch.device("cpu")
    trainer.Trainer.setup_trainer = setup_on_cpu
    torch.accelerator.synchronize = lambda *_, **__: None
    trainer.metric_logger = Noted(trainer.metric_logger, metrics)


def main() -> None:
    metrics, program, *args = sys.argv[1:]
    if program == "headrace":
        from headrace.cli.main import app

        if args[:2] == ["speculators", "train"]:
            import headrace.plugins.speculators  # noqa: F401 (their train module lists backends once, when imported)
    else:
        from speculators.cli import app
    on_the_cpu(Path(metrics))
    sys.argv[0] = program
    app(args)


if __name__ == "__main__":
    main()
