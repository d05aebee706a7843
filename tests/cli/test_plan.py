"""`headrace plan`: the flags that scripts rely on, and errors that say what is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app

NUMBERS = ("--hidden-size", "5120", "--blocks", "64", "--params", "27")


def test_the_published_arithmetic_through_the_command() -> None:
    words = [
        "plan",
        *NUMBERS,
        "--samples",
        "913786",
        "--mean-tokens",
        "800",
        "--taps",
        "1,16,31,46,61",
        "--codec",
        "raw",
    ]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["bytes_per_token"] == 51_200
    assert made["total_bytes"] == 913_786 * 800 * 51_200
    assert made["options"]


def test_a_table_is_for_people() -> None:
    result = CliRunner().invoke(app, ["plan", *NUMBERS, "--samples", "1000", "--mean-tokens", "800", "--explain"])
    assert result.exit_code == 0, result.stderr
    assert "after_block:1" in result.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--samples", "10", "--mean-tokens", "8"], "model"),
        ([*NUMBERS, "--samples", "0", "--mean-tokens", "8"], "0"),
        ([*NUMBERS, "--samples", "10", "--mean-tokens", "8", "--taps", "99"], "99"),
        ([*NUMBERS, "--samples", "10", "--mean-tokens", "8", "--capture-gpu", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_a_clear_error(words: list[str], found: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 3
    assert found in result.stderr


def test_the_command_loads_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from headrace.cli.main import app; app()"
    words = ["plan", *NUMBERS, "--samples", "10", "--mean-tokens", "8", "--json"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--measure"], "run file"),
        (["--set", "train.epochs=2", *NUMBERS, "--samples", "10", "--mean-tokens", "8"], "RUN.yaml"),
        (["--check", "nowhere"], "a saved plan"),
    ],
)
def test_what_needs_a_run_says_so(words: list[str], found: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 3
    assert found in result.stderr


def test_a_plan_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", *NUMBERS, "--samples", "10", "--mean-tokens", "8", "--save", str(path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert json.loads(path.read_text(encoding="utf-8"))["plan"]["bytes_per_token"] == 51_200
