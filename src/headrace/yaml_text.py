"""YAML as run files are written in it.

In: text. Out: values, or a ConfigError that says where; a key that stands twice is refused. And back: one value as one
line that reads back as the same value.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import yaml

from headrace.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key stands once: of two, PyYAML would drop the first without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written, before merge keys add others."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in lines:
                again = f"the key {key.value!r} again, first on line {lines[name]}"
                raise yaml.MarkedYAMLError(problem=again, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


def read_yaml(text: str, expected: str, place: str, hint: str) -> Any:
    """Values of a text. Raises: ConfigError with `place` before what was found, for text that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    # PyYAML lets through what the constructors of dates and tagged numbers raise.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as exc:
        raise ConfigError(expected, f"{place}{exc}", hint) from exc
    except RecursionError as exc:
        raise ConfigError(expected, f"{place}too many levels, one inside the other", hint) from exc


def flow(value: Any) -> str:
    """One line of YAML that reads back as the same value; JSON's floats and some of its texts would not."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str | float):
        style = '"' if isinstance(value, str) else None
        written: str = yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True)
        return written.partition("\n")[0]  # behind it may stand a line that ends the document
    return json.dumps(value)
