"""How commands fail: the message on stderr, the branch's exit code, and nothing else.

In: a command's work. Out: errors of the family as exits; an interrupt as exit 130, with what goes on from there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from headrace.errors import HeadraceError

INTERRUPTED = 130


@contextmanager
def failures_shown(console: Console) -> Iterator[None]:
    """Turn errors raised on purpose into exits; anything else is a fault of headrace and keeps its trace."""
    try:
        yield
    except HeadraceError as exc:
        text = f"headrace: {type(exc).__name__}: {exc}"
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(exc.exit_code) from exc
    except OSError as exc:  # a full disk, a file where a folder should be, no permission
        console.print(f"headrace: {exc}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from exc
    except KeyboardInterrupt as exc:
        console.print("headrace: interrupted; the same command goes on from here", markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from exc
