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


def test_ls_lists_records_and_failures(store: Path) -> None:
    code, out, _ = call("ls", str(store), "--json")
    assert code == 0
    assert [json.loads(line)["row"] for line in out.splitlines()] == [0, 1, 2]
    assert len(call("ls", str(store), "--limit", "2")[1].splitlines()) == 2
    with StoreWriter(store, fake_manifest(), 1 << 20, 60.0) as writer:
        writer.fail(fake_record(9, 1).id, 9, "not finite", permanent=True)
    assert json.loads(call("ls", str(store), "--failed", "--json")[1])["reason"] == "not finite"


def test_cat_shows_a_record_and_writes_its_payload(store: Path, tmp_path: Path) -> None:
    code, out, _ = call("cat", str(store), "1", "--payload", str(tmp_path / "p"), "--json")
    assert code == 0
    record = fake_record(1, 1)
    assert json.loads(out)["input_ids"] == record.input_ids.tolist()
    assert (tmp_path / "p").read_bytes() == record.segments[0].payload
    assert "payload_bytes: 768" in call("cat", str(store), "1", "--tokens", "0:5")[1]
    for wrong in (("7",), ("1", "--tokens", "5"), ("1", "--tokens", "5:99")):
        assert call("cat", str(store), *wrong)[0] == 8


def test_rm_removes_records(store: Path) -> None:
    assert call("rm", str(store))[0] == 8
    code, out, _ = call("rm", str(store), "0", "2", "--json")
    assert code == 0
    assert json.loads(out)["num_segments"] == 2
    assert json.loads(call("info", str(store), "--json")[1])["num_records"] == 1
    assert "0 segments" in call("rm", str(store), "--superseded")[1]


def test_merge_joins_folders_and_tells_what_is_damaged(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with StoreWriter(other, fake_manifest(), 1 << 20, 60.0) as writer:
        writer.add(fake_record(7, 1))
    code, out, _ = call("merge", str(store), str(other), "--out", str(tmp_path / "out"), "--json")
    assert code == 0
    assert json.loads(out)["num_records"] == 4
    (shard,) = (other / "shards").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, err = call("merge", str(store), str(other), "--out", str(tmp_path / "again"))
    assert (code, "rows 7" in err) == (8, True)
    assert "3 records" in out


def test_repair_of_the_indexes_alone_reads_no_payload(store: Path) -> None:
    (shard,) = (store / "shards").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    (store / "index.journal").unlink()
    code, out, _ = call("repair", str(store), "--indexes-only", "--json")
    assert code == 0
    assert json.loads(out)["rows"] == []
    assert json.loads(call("info", str(store), "--json")[1])["num_records"] == 3
    assert len(json.loads(call("repair", str(store), "--json")[1])["rows"]) == 1
