import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.files import Stage, append_json_line, locked, read_json_lines, stage_seconds, write_atomic, write_json


def test_a_file_is_written_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.txt"
    write_atomic(path, "é")
    assert path.read_bytes() == "é".encode()
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["c.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_any_step_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    write_atomic(path, "new")
    assert path.read_text() == "new"


def test_the_content_is_durable_before_the_name_and_the_name_before_return(tmp_path, monkeypatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    write_atomic(tmp_path / "a", "x")
    assert calls == ["fsync", "replace", "fsync"]


def test_json_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"z": 1, "a": ["ü"]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"z": 1, "a": ["ü"]}
    assert text.index("z") < text.index("a")
    assert "ü" in text


def test_a_stage_goes_from_new_over_begun_to_done(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "s", "capture", {"taps": ("after_block:1",), "seed": 0})
    assert stage.state() == "new"
    stage.begin()
    assert stage.state() == "resume"
    stage.finish({"num_tokens": 12})
    assert stage.state() == "done"
    again = Stage(tmp_path / "s", "capture", {"seed": 0, "taps": ["after_block:1"]})
    assert again.state() == "done"
    assert again.summary() == {"num_tokens": 12}


@pytest.mark.parametrize("now", [{"seed": 1, "taps": []}, {"seed": 0}, {"seed": 0, "taps": [], "dtype": "float32"}])
def test_another_identity_is_refused_by_field(tmp_path: Path, now: dict[str, object]) -> None:
    before = {"seed": 0, "taps": []}
    Stage(tmp_path, "capture", before).begin()
    field = next(k for k in ("dtype", "seed", "taps") if before.get(k) != now.get(k))
    with pytest.raises(ConfigError, match=f"the same {field}"):
        Stage(tmp_path, "capture", now).state()


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "\xff", '{"identity": 1, "finished": true, "summary": {}}'])
def test_a_damaged_stage_is_an_error_that_says_what_to_remove(tmp_path: Path, content: str) -> None:
    stage = Stage(tmp_path, "train", {})
    (tmp_path / "stage.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="to make this stage again"):
        stage.state()


def test_a_torn_last_line_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"n": 1})
    with open(path, "a") as out:
        out.write('{"n": 2, "tor')
    append_json_line(path, {"n": 3})
    assert read_json_lines(path) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("line", ["{", "[]", "\xff"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=r"lines\.jsonl:2"):
        read_json_lines(path)
    (tmp_path / "stages.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="stage and seconds"):
        stage_seconds(tmp_path)


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from headrace.files import locked\nwith locked(Path({str(tmp_path)!r}), 'x'): pass"
    )
    with locked(tmp_path, "train"):
        held = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is at it" in held.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
