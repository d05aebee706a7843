import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import StoreError
from headrace.store.objects import Objects
from headrace.store.remote import open_reader
from headrace.store.remote_verify import verify_objects
from headrace.store.shard import shard_name
from headrace.testing.states import fake_record, fake_sample
from tests.store.conftest import S3
from tests.store.test_remote import flip, write


def test_a_sound_store_has_no_damage(s3: S3, tmp_path: Path) -> None:
    address, told = write(s3.address(), tmp_path / "staging"), []
    assert verify_objects(address, lambda done, total: told.append((done, total))) == []
    assert [total for _, total in told] == [told[-1][0]] * 3


def test_each_damage_is_named(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    entries = open_reader(address).entries()
    flip(address, f"shards/{shard_name(1, 0)}", int(entries["offset"][3]) + 100)
    flip(address, f"shards/{shard_name(1, 1)}", -60)
    Objects(address).remove([f"shards/{shard_name(1, 2)}"])
    found = {(d.path, d.row, d.found) for d in verify_objects(address)}
    assert (shard_name(1, 0), 1, "a message whose digest does not match") in found
    assert any(path == shard_name(1, 1) and row == -1 for path, row, _ in found)
    assert {row for path, row, what in found if what == "no such shard"} == {4, 5}


def test_a_damaged_commit_stops_it(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    flip(address, "commits/0000000001", 50)
    with pytest.raises(StoreError, match="0000000001"):
        verify_objects(address)


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["store", *words])
    return result.exit_code, result.stdout, result.stderr


def test_commands_take_an_address(s3: S3, tmp_path: Path) -> None:
    address = write(s3.address(), tmp_path / "staging")
    code, out, _ = call("info", address, "--json")
    assert (code, json.loads(out)["num_records"], json.loads(out)["missing_shards"]) == (0, 6, [])
    code, out, _ = call("ls", address, "--json")
    assert [json.loads(line)["row"] for line in out.splitlines()] == list(range(6))
    code, out, _ = call("cat", address, "1", "--json", "--payload", str(tmp_path / "payload"))
    assert json.loads(out)["input_ids"] == fake_sample(1).input_ids.tolist()
    assert (tmp_path / "payload").read_bytes() == fake_record(1, 1).segments[0].payload
    assert call("verify", address, "--json")[:2] == (0, '{"damages": []}\n')
    flip(address, f"shards/{shard_name(1, 1)}", 3000)
    code, out, err = call("verify", address)
    assert code == 8
    assert shard_name(1, 1) in out
    assert f"store repair {address}" in err
    code, _, err = call("info", address + "-not")
    assert code == 8
    assert "a store at s3://" in err
