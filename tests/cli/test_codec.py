"""`headrace codec` through the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.testing.tiny_target import save_tiny_target
from tests.train.runs import make_run


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    make_run(root / "run", save_tiny_target(root / "target"), num_samples=30, num_heldout=5)
    path = root / "run.yaml"
    path.write_text(f"run: {root}/run\n")
    return path


def test_a_codec_is_fitted_and_reported(file: Path, tmp_path: Path) -> None:
    words = ["codec", "fit", str(file), "--rank", "8", "--bits", "4", "--out", str(tmp_path / "c"), "--json"]
    fitted = CliRunner().invoke(app, words)
    assert fitted.exit_code == 0, fitted.stderr
    assert json.loads(fitted.stdout)["num_features"] == 8
    reported = CliRunner().invoke(app, ["codec", "report", str(file), "fp8", str(tmp_path / "c"), "--json"])
    assert [row["codec"] for row in json.loads(reported.stdout)] == ["fp8", str(tmp_path / "c")]


@pytest.mark.parametrize("more", [["--scheme", "ice"], ["--rank", "999"]])
def test_bad_wishes_are_refused(file: Path, tmp_path: Path, more: list[str]) -> None:
    words = ["codec", "fit", str(file), "--rank", "8", "--bits", "4", "--out", str(tmp_path / "c"), *more]
    result = CliRunner().invoke(app, words)
    assert result.exit_code not in (0, 1)
    assert "expected" in result.stderr


def test_states_at_an_address_are_fitted_on(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"memory://{tmp_path}/states"
    done = CliRunner().invoke(app, ["store", "merge", str(file.parent / "run" / "states"), "--out", address])
    assert done.exit_code == 0, done.stderr
    fits = []
    for number, more in enumerate([[], ["--set", f"store.at={address}"]]):
        out = tmp_path / f"c{number}"
        words = ["codec", "fit", str(file), "--rank", "8", "--bits", "4", "--out", str(out), "--json", *more]
        fitted = CliRunner().invoke(app, words)
        assert fitted.exit_code == 0, fitted.stderr
        fits.append((out / "basis.safetensors").read_bytes())
    assert fits[0] == fits[1]
    monkeypatch.setattr("headrace.store.shard_files.FolderShards.view", None)  # no shard of a folder is read any more
    words = ["codec", "report", str(file), "fp8", "--json", "--set", f"store.at={address}"]
    assert json.loads(CliRunner().invoke(app, words).stdout)[0]["codec"] == "fp8"
    words = ["store", "transcode", str(file), "fp8", "--out", str(tmp_path / "to"), "--at", f"{address}-fp8", "--json"]
    done = CliRunner().invoke(app, [*words, "--set", f"store.at={address}"])
    assert done.exit_code == 0, done.stderr
    assert (
        json.loads(CliRunner().invoke(app, ["store", "info", f"{address}-fp8", "--json"]).stdout)["num_records"] == 30
    )
