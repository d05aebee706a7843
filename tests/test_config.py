from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from headrace.config import MiB, RunFile, RunFolder, Strict, leaves, load_run_file, settings_table
from headrace.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_everything_is_a_default() -> None:
    resolved = load_run_file(None)
    assert resolved.run == RunFile()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.run.store.shard_bytes == 256 * MiB


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {lr: 0.01, epochs: 3}\norder: {seed: 4}\n")
    resolved = load_run_file(path, ["train.lr=3e-4", "store.shard_seconds=5"])
    assert (resolved.run.train.lr, resolved.run.train.epochs, resolved.run.order.seed) == (3e-4, 3, 4)
    origins = {k: resolved.origins[k] for k in ("train.lr", "train.epochs", "store.shard_seconds", "train.seed")}
    assert origins == {
        "train.lr": "flag",
        "train.epochs": "file",
        "store.shard_seconds": "flag",
        "train.seed": "default",
    }


def test_every_setting_has_an_origin() -> None:
    resolved = load_run_file(None, ["floor=false"])
    assert set(resolved.origins) == {path for path, _ in leaves(RunFile().model_dump())}
    assert resolved.origins["floor"] == "flag"
    assert resolved.run.floor is False


def test_a_flag_inside_a_free_form_setting_counts_as_a_flag() -> None:
    resolved = load_run_file(None, ["prepare.template_args.enable_thinking=false"])
    assert resolved.run.prepare.template_args == {"enable_thinking": False}
    assert resolved.origins["prepare.template_args"] == "flag"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("target.taps=[after_block:1, embedding]", ["after_block:1", "embedding"]),
        ("target.taps=null", None),
        ("target.model=some/folder", "some/folder"),
    ],
)
def test_flags_are_yaml(flag: str, value: object) -> None:
    run = load_run_file(None, [flag]).run
    assert run.target.model_dump()[flag.split("=")[0].split(".")[1]] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rate: 1}", "train.learning_rate: unknown key"),
        ("trian: {lr: 1}", "trian: unknown key"),
        ("train: {lr: fast}", "train.lr"),
        ("train: {lr: 0}", "train.lr"),
        ("target: {dtype: int8}", "target.dtype"),
        ("train: {micro_tokens: 9, step_tokens: 8}", "micro_tokens must be <= train.step_tokens"),
        ("prepare: {heldout_fraction: 1.0}", "prepare.heldout_fraction"),
        ("train: 3", "train"),
        ("- a\n- b", "a list"),
        ("a: b: c", "YAML"),
    ],
)
def test_a_wrong_run_file_is_refused_by_the_path_of_its_setting(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(write(tmp_path, text))


@pytest.mark.parametrize(
    ("flag", "message"),
    [("train.lr", "--set"), ("=3", "--set"), ("run.x=1", "run"), ("train.nope=1", "train.nope: unknown key"),
     ("target.taps=[1", "YAML")],
)  # fmt: skip
def test_a_wrong_flag_is_refused(tmp_path: Path, flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(write(tmp_path, "run: runs/x"), [flag])


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable run file"):
        load_run_file(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="readable run file"):
        load_run_file(tmp_path / "b.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, "# nothing\n")).run == RunFile()


def test_resolved_settings_read_back_with_their_origins(tmp_path: Path) -> None:
    flags = ["train.lr=3e-4", "prepare.template_args={enable_thinking: false}", "target.model=Grüße #1"]
    resolved = load_run_file(write(tmp_path, "order: {seed: 9}"), flags)
    saved = resolved.save(tmp_path / "out")
    assert load_run_file(saved).run == resolved.run
    lines = saved.read_text(encoding="utf-8").splitlines()
    assert "  lr: 0.0003  # flag" in lines
    assert "  seed: 9  # file" in lines
    assert "  epochs: 6  # default" in lines
    assert len(lines) == len(resolved.origins) + len(
        [v for v in yaml.safe_load(saved.read_text()).values() if isinstance(v, dict)]
    )


def test_settings_cannot_be_changed_once_read() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_run_file(None).run.train.lr = 1.0  # type: ignore[misc]


def test_every_setting_is_described_and_in_the_table() -> None:
    table = settings_table()
    for name, field in RunFile.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Strict):
            for key, inner in section.model_fields.items():
                assert inner.description, f"{name}.{key}"
                assert f"| `{name}.{key}` |" in table
        else:
            assert f"| `{name}` |" in table


def test_each_stage_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    paths = [folder.prompts, folder.answers, folder.prepared, folder.states, folder.train(), folder.train(False),
             folder.export, folder.evaluation]  # fmt: skip
    assert len(set(paths)) == len(paths)
    assert all(path.parent == tmp_path for path in paths)
