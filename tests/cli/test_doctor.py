import json
from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.main import app
from tests.doctor.stories import healthy, write_run


def test_findings_as_json_and_for_people(tmp_path: Path) -> None:
    write_run(tmp_path, healthy(tmp_path / "prepared", metrics={"wait": 0.5}))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert done.exit_code == 0
    assert [one["name"] for one in json.loads(done.stdout)] == ["waits-for-data", "forecast"]
    told = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert "next: raise train.read_ahead" in told.stderr
    assert told.stdout == ""


def test_a_run_file_names_its_run(tmp_path: Path) -> None:
    write_run(tmp_path, healthy(tmp_path / "prepared"))
    (tmp_path / "run.yaml").write_text(f"run: {tmp_path}\n")
    told = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml")])
    assert told.exit_code == 0
    assert "nothing wrong found" in told.stderr


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["doctor", str(tmp_path)]).exit_code == 2
