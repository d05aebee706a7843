"""`headrace plan`: the flags that scripts rely on, and errors that say what is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
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


SAMPLES = ("--samples", "10", "--mean-tokens", "8")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([*NUMBERS, *SAMPLES, "--link", "0 Gbit/s", "--train-gpu", "b200", "--capture-gpu", "b200"], "a rate above 0"),
        (["--hidden-size", "5120", "--blocks", "64", "--params", "inf", *SAMPLES], "params_billion"),
        (["--hidden-size", "5120", "--blocks", "64", "--params", "nan", *SAMPLES], "params_billion"),
        ([*NUMBERS, "--samples", "9" * 400, "--mean-tokens", "8"], "num_samples"),
        ([*NUMBERS, *SAMPLES, "--mean-prompt", "-5", "--mean-answer", "5"], "--mean-prompt"),
        ([*NUMBERS, *SAMPLES, "--mean-prompt", "nan", "--mean-answer", "5"], "mean_prompt"),
    ],
)
def test_numbers_that_are_none_are_clear_errors(words: list[str], found: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 3
    assert found in result.stderr


def test_a_folder_to_save_in_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    result = CliRunner().invoke(app, ["plan", *NUMBERS, *SAMPLES, "--json", "--save", str(folder)])
    assert result.exit_code == 3
    assert str(folder) in result.stderr
    assert json.loads(result.stdout)["bytes_per_token"] == 51_200
    assert list(tmp_path.rglob("*")) == [folder]


def checked(root: Path, plan: str, *words: str) -> Result:
    """Check a run that captured, with a plan.json of this content."""
    (root / "states").mkdir()
    summary = {"bytes_raw": 100, "bytes_stored": 120}
    (root / "states" / "stage.json").write_text(json.dumps({"identity": {}, "finished": True, "summary": summary}))
    (root / "plan.json").write_text(plan)
    return CliRunner().invoke(app, ["plan", "--check", str(root), *words])


def saved(figures: str) -> str:
    return f'{{"made_for": "x", "cost_against_disk": [], "plan": {{"figures": {figures}}}}}'


@pytest.mark.parametrize("figures", ["[]", "5", "{}", '{"total_bytes": {}}', '{"total_bytes": {"value": NaN}}'])
def test_a_damaged_plan_cannot_be_checked(tmp_path: Path, figures: str) -> None:
    result = checked(tmp_path, saved(figures))
    assert result.exit_code == 3
    assert "PlanError" in result.stderr


def test_a_check_prints_no_infinity(tmp_path: Path) -> None:
    result = checked(tmp_path, saved('{"total_bytes": {"value": 0}}'), "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout, parse_constant=pytest.fail)
    assert row["ratio"] is None
