"""A run's stages against a real server: answers, states encoded there, and a probe that tells right from wrong."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.prepare.prepared import PreparedSet
from headrace.store.reader import StoreReader
from tests.vllm.servers import engine, engine_file, run_file, run_folder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def headrace(*words: str) -> "subprocess.CompletedProcess[str]":
    program = str(Path(sys.executable).with_name("headrace"))
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def test_a_run_is_answered_and_captured_by_a_server_and_the_probe_tells_right_from_wrong(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    run = yaml.safe_load(path.read_text())
    run |= {"prepare": {"num_demo_prompts": 12}, "regenerate": {"max_new_tokens": 8}}
    path.write_text(yaml.safe_dump(run))
    folder = run_folder(path)
    assert headrace("prepare", str(path)).returncode == 0
    with engine(path):
        for stage in ("regenerate", "capture"):
            done = headrace(stage, str(path))
            assert done.returncode == 0, done.stderr
        right = headrace("probe", str(path), "--json")
        assert right.returncode == 0, right.stderr
        assert any("encoded states" in one["what"] for one in json.loads(right.stdout))
        # As if the server had been launched for the block before each: what the client believes is one off.
        file = engine_file(path)
        later = [name.replace("after_block:1", "after_block:2") for name in file.taps]
        dataclasses.replace(file, taps=later).write(folder / "engines" / "0")
        run["target"]["taps"] = ["after_block:20", "after_block:2", "after_block:27"]
        path.write_text(yaml.safe_dump(run))
        wrong = headrace("probe", str(path), "--json")
        file.write(folder / "engines" / "0")
    assert wrong.returncode == 6
    assert "after_block:2 holds after_block:1: one block early" in {one["cause"] for one in json.loads(wrong.stdout)}
    prepared, reader = PreparedSet.open(folder / "prepared"), StoreReader(folder / "states")
    assert sorted(reader.rows.tolist()) == list(range(prepared.num_samples))
    reader.close()
