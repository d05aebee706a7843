"""Kinds of values that settings take, and the base of every section of the run file.

In: values as YAML reads them. Out: the same values, or a ValueError that says what is needed; `headrace.config` turns
it into a ConfigError that names the setting. A source of chats is such a kind: lists of several settings hold it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LOWEST_TEMPERATURE = 0.01  # as in vLLM: lower ones end in overflow
_MOST_LEVELS = 32  # of a free-form setting


def _no_truth(value: Any) -> Any:
    """Pydantic would read true as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def greedy_or_warm(value: float) -> float:
    """A temperature: 0 or at least LOWEST_TEMPERATURE. Raises: ValueError."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"0 (greedy) or at least {LOWEST_TEMPERATURE} is needed")
    return value


def plain(value: Any, name: str = "", level: int = 0) -> Any:
    """Refuse what JSON cannot hold: it is hashed, saved beside every output, and read back."""
    if level > _MOST_LEVELS:
        raise ValueError(f"at most {_MOST_LEVELS} levels are needed, one inside the other")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"text is needed as a key, not the {type(key).__name__} {key!r}: quote it")
            plain(inner, f"{name}.{key}" if name else key, level + 1)
    elif isinstance(value, list):
        for inner in value:
            plain(inner, name, level + 1)
    elif value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{name} is a {type(value).__name__}: quote it, so that the template is given text")
    return value


Int = Annotated[int, BeforeValidator(_no_truth)]
Float = Annotated[float, BeforeValidator(_no_truth)]
Beta = Annotated[Float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    """A section: unknown keys refused, frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


FUNCTION_CALL = "function_call"
ROLES = ("system", "developer", "user", "assistant", "tool")
# A turn that is nothing but a call to a tool has a role of its own in from/value data.
ALIASED_ROLES = (*ROLES, FUNCTION_CALL)


def known_roles(roles: dict[str, str]) -> dict[str, str]:
    """Aliases of roles. Raises: ValueError for one that stands for no role."""
    if wrong := sorted({role for role in roles.values() if role not in ALIASED_ROLES}):
        raise ValueError(f"roles among {sorted(ALIASED_ROLES)} are needed, not {wrong}")
    return roles


class DataSource(Strict):
    """One source of chats, where a plain path does not say enough."""

    path: str = Field(description="a file, a folder, demo, or hub:OWNER/NAME")
    name: str | None = Field(None, description="what its samples are counted under; none means the file's name")
    layout: Literal["auto", "messages", "conversations", "prompt", "instruction", "ids"] = Field(
        "auto", description="layout of its rows"
    )
    subset: str | None = Field(None, description="configuration of a hub data set")
    split: str | None = Field(None, description="split of a `datasets` folder or of a hub data set")
    weight: Float = Field(1.0, gt=0, le=1, description="share of its chats that is taken, chosen by content")
    max_chats: Int | None = Field(None, ge=1, description="stop after so many of its chats")

    @classmethod
    def of(cls, given: "str | DataSource") -> "DataSource":
        """A path stands for the source with nothing else said."""
        return cls(path=given) if isinstance(given, str) else given
