"""Asked to stop: finish the step, save, leave.

In: SIGTERM or SIGINT while a run trains. Out: a flag that the loop reads between steps. A second signal of the same
kind finds the handler that stood there before, so a person who insists is obeyed at once.
"""

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Watches for signals as a context manager; in a thread other than the main one it watches nothing."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._before):
            self._restore(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore(self.signal)

    def _restore(self, number: signal.Signals) -> None:
        before = self._before.pop(number, None)
        if before is not None:
            signal.signal(number, before)


def leave(found: signal.Signals) -> NoReturn:
    """End the run as a signal asks: KeyboardInterrupt for SIGINT, exit code 143 for SIGTERM."""
    if found is signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
