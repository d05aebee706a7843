"""Errors raised on purpose become exits, and nothing else does."""

import io

import pytest
import typer
from rich.console import Console

from headrace.cli.failure import failures_shown
from headrace.errors import StoreError


def test_an_error_of_the_family_ends_with_its_branchs_code_and_its_message() -> None:
    out = io.StringIO()
    with pytest.raises(typer.Exit) as ended, failures_shown(Console(file=out, width=40)):
        raise StoreError("a [store]", "none", "make one")
    assert ended.value.exit_code == StoreError.exit_code
    assert out.getvalue() == "headrace: StoreError: expected a [store], found none\n\nhint: make one\n"


def test_an_interrupt_says_how_to_go_on() -> None:
    out = io.StringIO()
    with pytest.raises(typer.Exit) as ended, failures_shown(Console(file=out)):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert "goes on from here" in out.getvalue()


def test_a_fault_of_ours_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError), failures_shown(Console(file=io.StringIO())):
        _ = 1 / 0
