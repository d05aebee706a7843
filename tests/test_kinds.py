"""Kinds of values that settings take."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.config import PrepareConfig, load_run_file
from headrace.errors import ConfigError
from headrace.kinds import DataSource, ServeConfig, greedy_or_warm, known_roles, plain


def test_a_path_stands_for_a_source_with_nothing_else_said() -> None:
    assert DataSource.of("a.jsonl") == DataSource(path="a.jsonl")
    given = DataSource(path="b.jsonl", weight=0.5)
    assert DataSource.of(given) is given


@pytest.mark.parametrize(
    "wrong", [{"weight": 0}, {"weight": 1.5}, {"layout": "sharegpt"}, {"max_chats": 0}, {"paths": "x"}]
)
def test_a_source_takes_what_it_knows(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataSource.model_validate({"path": "a.jsonl", **wrong})


def test_aliases_stand_for_roles() -> None:
    assert known_roles({"bot": "assistant", "call": "function_call"})
    with pytest.raises(ValueError, match="wizard"):
        known_roles({"bot": "wizard"})


def test_free_form_settings_hold_what_json_holds() -> None:
    assert plain({"a": [1, "b", None]}) == {"a": [1, "b", None]}
    with pytest.raises(ValueError, match="text is needed as a key"):
        plain({1: "a"})


def test_temperatures_are_zero_or_warm() -> None:
    assert greedy_or_warm(0.0) == 0.0
    with pytest.raises(ValueError, match="at least"):
        greedy_or_warm(0.001)


@pytest.mark.parametrize("wrong", ["", "2", "0/2", "3/2", "a/b", "1/", "-1/2", "1/2/3"])
def test_a_part_is_one_of_several(wrong: str) -> None:
    assert ServeConfig(part="2/3").part == "2/3"
    with pytest.raises(ValidationError, match="K/N"):
        ServeConfig(part=wrong)


def test_sources_of_a_run_file_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("prepare: {data: [a.jsonl, {path: b.json, weight: 0.5, name: b}], roles: {bot: assistant}}\n")
    found = load_run_file(path)
    again = tmp_path / "again.yaml"
    again.write_text(found.to_yaml())
    assert load_run_file(again).run == found.run
    assert found.run.prepare.data == ["a.jsonl", DataSource(path="b.json", weight=0.5, name="b")]
    with pytest.raises(ConfigError, match=r"prepare\.data\.0"):
        load_run_file(None, ["prepare.data=[{path: a, wait: 1}]"])


def test_newer_settings_decide_samples_only_where_they_are_set() -> None:
    older = set(PrepareConfig().decisive())
    assert older == {
        "num_demo_prompts", "max_tokens", "min_trained_tokens", "heldout_fraction", "template_args", "max_samples"
    }  # fmt: skip
    assert PrepareConfig(train_turns="last").decisive()["train_turns"] == "last"
