import math
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.yaml_text import flow, read_yaml


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, 1e-4, 1e300, "", "true", "3e-4", "a: b", "two\nlines", "…", [1, ["x"]], {"k": {"1": None}}],
)
def test_a_value_on_one_line_reads_back_the_same(value: Any) -> None:
    line = flow(value)
    assert "\n" not in line
    assert read_yaml(line, "a value", "", "look") == value


def test_infinity_reads_back() -> None:
    assert read_yaml(flow(math.inf), "a value", "", "look") == math.inf


@pytest.mark.parametrize("text", ["a: 1\na: 2", "{a: 1, a: 2}", "[", "a: b: c", "x: 2026-99-99", "[" * 3000])
def test_what_cannot_be_read_is_an_error_that_says_where(text: str) -> None:
    with pytest.raises(ConfigError, match=r"here\.yaml"):
        read_yaml(text, "YAML", "here.yaml: ", "mend it")
