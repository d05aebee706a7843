import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config import MiB, Resolved, RunFile, RunFolder, Strict, leaves, load_run_file, settings_table
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train:\n  lr: 0.1\norder: {seed: 1}\ntrain:\n  epochs: 2\n", r"'train' again, first on line 1.*line 4"),
        ("train:\n  lr: 0.1\n  lr: 0.2\n", r"'lr' again, first on line 2.*line 3"),
        ("prepare: {template_args: {a: 1, 'a': 2}}", r"'a' again.*line 1"),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){found}"):
        load_run_file(write(tmp_path, text))


def test_a_key_given_twice_in_a_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' again"):
        load_run_file(None, ["prepare.template_args={a: 1, a: 2}"])


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    text = "prepare: {template_args: {one: &one {a: 1, b: 2}, two: {<<: *one, a: 3}}}"
    assert load_run_file(write(tmp_path, text)).run.prepare.template_args["two"] == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "too many levels"),
        ("a: 2024-13-45", "YAML"),
        ("a: !!int x", "YAML"),
        ("a: !!timestamp x", "YAML"),
        ("a: !!bool x", "YAML"),
        ("a: !!python/object:os.system x", "YAML"),
    ],
)
def test_yaml_that_cannot_be_built_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(write(tmp_path, text))
    with pytest.raises(ConfigError, match=message):
        load_run_file(None, [f"prepare.template_args={{{text}}}" if text[0] == "a" else f"run={text}"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{date_string: 2024-07-26}", "date_string is a date: quote it"),
        ("{when: {at: [2024-07-26 10:00:00]}}", "when.at is a datetime: quote it"),
        ("{a: !!binary aGk=}", "a is a bytes: quote it"),
        ("{a: !!set {b, c}}", "a is a set: quote it"),
        ("{a: !!pairs [b: c]}", "a is a tuple: quote it"),
        ("{a: {1: b}}", "not the int 1: quote it"),
        ("{a: &x [*x]}", "at most 32 levels"),
        ("{a: " + "[" * 50 + "]" * 50 + "}", "at most 32 levels"),
        ('{a: "\\ud83d"}', "UTF-8"),
        ('{"\\ud83d": 1}', "UTF-8"),
    ],
)
def test_template_arguments_are_what_json_can_hold(tmp_path: Path, args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(write(tmp_path, f"prepare: {{template_args: {args}}}"))


def test_half_a_character_is_refused_anywhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        load_run_file(write(tmp_path, 'run: "caf\\udce9"'))
    with pytest.raises(ConfigError, match="unacceptable character"):
        load_run_file(None, ["run=caf\udce9"])


@pytest.mark.parametrize(
    "flag",
    [
        "train.betas=[0.9, 1.0]", "train.betas=[-0.1, 0.9]", "train.betas=[true, 0.9]", "train.lr=11", "train.lr=true",
        "train.lr=.nan", "train.epochs=true", "train.max_steps=true", "order.seed=2147483648",
        "regenerate.seed=2147483648", "evaluate.seed=2147483648", "train.seed=2147483648",
        "regenerate.temperature=0.001", "evaluate.temperature=1e-9", "evaluate.temperature=-1",
        "regenerate.top_p=0.001", "target.device=meta", "target.device=mps", "target.device=xla",
        "target.device=cuda:", "target.device=cpu:1",
    ],
)  # fmt: skip
def test_a_setting_that_would_fail_later_is_refused_by_its_path(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.split("=")[0].replace(".", r"\.")):
        load_run_file(None, [flag])


@pytest.mark.parametrize(
    "flag",
    [
        "train.betas=[0, 0.999]", "train.lr=10", "train.max_steps=null", "train.seed=2147483647", "train.clip=.inf",
        "regenerate.temperature=0", "evaluate.temperature=0.01", "regenerate.top_p=0.01", "train.autocast=true",
        "target.device=cuda:7", "target.device=cuda",
    ],
)  # fmt: skip
def test_the_edges_of_settings_are_taken(flag: str) -> None:
    load_run_file(None, [flag])


def test_a_number_in_yaml_11_text_is_read(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, "train: {lr: 3e-4}")).run.train.lr == 3e-4


def test_a_rule_over_two_settings_shows_these_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(None, ["train.micro_tokens=9", "train.step_tokens=8"])
    assert "found 9" in str(caught.value)
    assert "{" not in str(caught.value)


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


def read_back(tmp_path: Path, resolved: Resolved) -> RunFile:
    return load_run_file(resolved.save(tmp_path)).run


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(args=st.dictionaries(st.text(), PLAIN, max_size=3))
def test_template_arguments_read_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, args: Any) -> None:
    run = RunFile.model_validate({"prepare": {"template_args": args}})
    resolved = Resolved(run, dict.fromkeys((path for path, _ in leaves(run.model_dump())), "file"))
    found = read_back(tmp_path_factory.mktemp("args"), resolved)
    assert found == run
    assert json.dumps(found.prepare.template_args) == json.dumps(args)


def test_floats_read_back_as_floats(tmp_path: Path) -> None:
    flags = ["prepare.template_args={a: 1.0e-5, b: .inf, c: .nan, d: 1.0e+300}", "train.lr=1e-5", "train.clip=.inf"]
    resolved = load_run_file(None, flags)
    found = read_back(tmp_path, resolved)
    args = found.prepare.template_args
    assert (args["a"], args["b"], args["d"]) == (1e-5, math.inf, 1e300)
    assert math.isnan(args["c"])
    assert (found.train.lr, found.train.clip) == (1e-5, math.inf)


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


@pytest.mark.parametrize("wrong", ["target.engine=transformers", "capture.tokens=all"])
def test_answers_with_states_need_engines_and_the_needed_tokens(wrong: str) -> None:
    flags = ["regenerate.with_states=true", "target.engine=vllm", "capture.tokens=needed"]
    assert load_run_file(None, flags).run.regenerate.with_states
    with pytest.raises(
        ConfigError, match=r"regenerate\.with_states needs target\.engine vllm and capture\.tokens needed"
    ):
        load_run_file(None, [*flags, wrong])
