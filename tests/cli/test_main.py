"""Commands: what they print, and how they fail."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_help_names_every_stage() -> None:
    code, out, _ = call("--help")
    assert code == 0
    for stage in ("prepare", "regenerate", "capture", "train", "export", "eval", "report", "run", "show"):
        assert stage in out


def test_an_unknown_setting_is_an_error_with_its_path_and_exit_code_2() -> None:
    code, out, err = call("run", "--set", "train.lrr=1")
    assert code == 2
    assert out == ""
    assert "train.lrr: unknown key" in err.replace("\n", " ")


@pytest.mark.parametrize("content", ["run: [", "- a\n- b\n", "target: {model: 3}\n"])
def test_a_broken_run_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert call("prepare", str(path))[0] == 2


def test_a_missing_run_file_is_an_error(tmp_path: Path) -> None:
    code, _, err = call("prepare", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml" in err


def test_missing_chats_leave_nothing_behind(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, err = call("prepare", "--set", f"run={run}", "--set", f"prepare.data=[{tmp_path}/chats.jsonl]")
    assert code not in (0, 1)
    assert "chats.jsonl" in err.replace("\n", "")
    assert not list(run.rglob("*.arrow"))


def test_a_slice_is_not_captured_on_a_cluster() -> None:
    code, out, err = call("capture", "--ray", "--raw-slice", "100")
    assert code == 2
    assert out == ""
    assert "leave --ray out" in err
