"""Progress for people: a live line on a terminal, a plain line now and then elsewhere.

In: what a stage reports (headrace.progress.Progress). Out: stderr; stdout stays for programs.
"""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class Terminal:
    """Draws a bar with count, figures, time taken and time left on a terminal; a line every 30 s in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""
        self._unit = ""
        self._total: int | None = None
        self._begun = self._told = 0.0
        self._first = 0

    def start(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        """Begin a piece of work of `total` units, `done` of them done before."""
        self.end()
        self._what, self._unit, self._total, self._first = what, unit, total, done
        self._begun = self._told = time.monotonic()
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}  {task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(what, total=total, completed=done, unit=unit, figures="")

    def advance(self, done: int, **figures: float | int | str) -> None:
        """Move the bar to `done` and show the figures."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in figures.items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, figures=text)
        elif not self._console.is_terminal and time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            left = self._seconds_left(done)
            tail = "" if left is None else f"  about {left:.0f} s left"
            self._console.print(
                f"{self._what}: {done:,}/{self._total or '?'} {self._unit}  {text}{tail}",
                highlight=False,
                soft_wrap=True,
            )

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def note(self, message: str) -> None:
        """Print a line that stays."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _seconds_left(self, done: int) -> float | None:
        moved = done - self._first
        if self._total is None or moved <= 0:
            return None
        return (time.monotonic() - self._begun) / moved * max(0, self._total - done)


def _short(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
