"""Progress goes to the console it was given, and counts from where a run resumed."""

import io

from rich.console import Console

from headrace.cli.progress import Terminal


def test_a_log_gets_notes_and_no_bars() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out))
    terminal.start("capture", 10, "samples", done=4)
    terminal.advance(5, tokens_s=100.0)
    terminal.end()
    terminal.note("chose [taps]")
    assert out.getvalue() == "chose [taps]\n"


def test_a_terminal_gets_a_bar_with_figures() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=True, width=160))
    terminal.start("capture", 10, "samples", done=4)
    terminal.advance(5, tokens_s=1234.0)
    terminal.end()
    assert "samples" in out.getvalue()
    assert "1,234" in out.getvalue()
