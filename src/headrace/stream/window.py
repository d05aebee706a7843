"""How many bytes of answers are on their way to readers at once.

In: answers that want room, move on, and end. Out: room, first come, first served. Where there is none, the answer that
has not moved for longest is cut off: its reader asks again, and one that sleeps holds up nobody.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

_PATIENCE_S = 1.0  # an answer that moved within it is not cut off


class Answer:
    """Bytes that one answer holds, and when it last moved."""

    def __init__(self, window: "Window", cut: Callable[[], object]) -> None:
        self._window = window
        self.cut = cut
        self.num_bytes = 0
        self.moved = time.monotonic()
        self.ended = self.cutting = False

    def grow(self, num_bytes: int, timeout_s: float) -> bool:
        """Take room for so many bytes; an answer too large for the window gets it alone. False: none in time."""
        return self._window.admit(self, num_bytes, timeout_s)

    def sent(self, num_bytes: int) -> None:
        """Say that a message was taken by the reader."""
        self._window.shrink(self, num_bytes)

    def end(self) -> None:
        """Give back what it still holds; safe to call twice."""
        self._window.end(self)


class Window:
    """Room for `bound` bytes of answers."""

    def __init__(self, bound: int, stall_s: float) -> None:
        self._bound, self._stall_s = bound, stall_s
        self._changed = threading.Condition()
        self._answers: set[Answer] = set()
        self._waiting: deque[object] = deque()
        self.num_bytes = 0
        self.num_cut = 0

    def begin(self, cut: Callable[[], object]) -> Answer:
        """A new answer without bytes. Args: cut: ends it when it stands in the way; it is called at most once."""
        answer = Answer(self, cut)
        with self._changed:
            self._answers.add(answer)
        return answer

    def admit(self, answer: Answer, num_bytes: int, timeout_s: float) -> bool:
        """As Answer.grow."""
        until = time.monotonic() + timeout_s
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while self._waiting[0] is not place or not self._fits(num_bytes, answer):
                    left = until - time.monotonic()
                    if left <= 0 or answer.ended:
                        return False
                    if self._waiting[0] is place:
                        self._cut_the_slowest(answer)
                    self._changed.wait(min(left, 0.1))
                answer.num_bytes += num_bytes
                self.num_bytes += num_bytes
                return True
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def shrink(self, answer: Answer, num_bytes: int) -> None:
        """As Answer.sent."""
        with self._changed:
            answer.moved = time.monotonic()
            given = min(num_bytes, answer.num_bytes)
            answer.num_bytes -= given
            self.num_bytes -= given
            self._changed.notify_all()

    def end(self, answer: Answer) -> None:
        """As Answer.end."""
        with self._changed:
            answer.ended = True
            self._answers.discard(answer)
            self.num_bytes -= answer.num_bytes
            answer.num_bytes = 0
            self._changed.notify_all()

    def cut_stalled(self) -> None:
        """Cut off what holds bytes and has not moved for `stall_s`."""
        with self._changed:
            before = time.monotonic() - self._stall_s
            for answer in list(self._answers):
                if answer.num_bytes and answer.moved < before:
                    self._cut(answer)

    def _fits(self, num_bytes: int, answer: Answer) -> bool:
        others = self.num_bytes - answer.num_bytes
        return self.num_bytes + num_bytes <= self._bound or others == 0

    def _cut_the_slowest(self, asking: Answer) -> None:
        before = time.monotonic() - _PATIENCE_S
        slow = [a for a in self._answers if a is not asking and a.num_bytes and a.moved < before and not a.cutting]
        if slow:
            self._cut(min(slow, key=lambda a: a.moved))

    def _cut(self, answer: Answer) -> None:
        if not answer.cutting:
            answer.cutting = True
            self.num_cut += 1
            answer.cut()
