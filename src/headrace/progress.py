"""Progress of long work, told by rooms and shown by whoever runs them.

In: how much is done, of how much, and a few figures. Out: nothing here: `cli` draws it, tests and libraries are silent.
"""

from typing import Protocol


class Progress(Protocol):
    """Told by a stage; `total` counts what the store holds, so a resumed run starts at the right place."""

    def start(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        """Begin one piece of long work."""
        ...

    def advance(self, done: int, **figures: float | int | str) -> None:
        """Report how much is done in all, with figures such as tokens_s or loss."""
        ...

    def end(self) -> None:
        """Finish the piece of work."""
        ...

    def note(self, message: str) -> None:
        """Say something once: a choice made for the user with its reason, a count, a warning."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        """Ignore."""

    def advance(self, done: int, **figures: float | int | str) -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""
