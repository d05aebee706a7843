"""`headrace store`: look, check, mend."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.store.writer import StoreWriter
from headrace.testing.states import fake_manifest, fake_record


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "states", fake_manifest(), 1 << 20, 60.0) as writer:
        for row in range(3):
            writer.add(fake_record(row, writer.generation))
    return tmp_path / "states"


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["store", *words])
    return result.exit_code, result.stdout, result.stderr


def test_info_counts_records(store: Path) -> None:
    code, out, _ = call("info", str(store), "--json")
    assert code == 0
    assert json.loads(out)["num_records"] == 3


def test_damage_is_named_and_repaired(store: Path) -> None:
    assert call("verify", str(store))[0] == 0
    (shard,) = (store / "shards").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    code, out, err = call("verify", str(store), "--json")
    assert code == 8
    assert json.loads(out)["damages"][0]["path"].endswith(shard.name)
    assert "store repair" in err
    assert call("repair", str(store))[0] == 0
    assert call("verify", str(store))[0] == 0


def test_a_folder_that_is_no_store_is_an_error(tmp_path: Path) -> None:
    assert call("info", str(tmp_path))[0] == 8


def test_info_says_that_shards_are_missing(store: Path) -> None:
    code, out, err = call("info", str(store), "--json")
    assert json.loads(out)["missing_shards"] == []
    assert err == ""
    shutil.rmtree(store / "shards")
    code, out, err = call("info", str(store), "--json")
    assert code == 0
    assert json.loads(out)["missing_shards"] == ["000001-000000.arrow"]
    assert "missing shards: 1" in err


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_no_folder_of_shards_is_a_clear_error(store: Path, command: str) -> None:
    shutil.rmtree(store / "shards")
    code, _, err = call(command, str(store))
    assert code == 8
    assert "shards" in err
    assert "capture again" in err


def test_damaged_failures_are_told_and_mended(store: Path) -> None:
    (store / "failures.jsonl").write_text("rubbish\n")
    assert call("verify", str(store))[0] == 8
    code, out, _ = call("repair", str(store))
    assert code == 0
    assert "failures.jsonl: 1 damaged lines" in out
    assert call("verify", str(store))[0] == 0
