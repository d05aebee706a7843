"""Kinds of values that settings take, and the base of every section of the run file.

In: values as YAML reads them. Out: the same values, or a ValueError that says what is needed; `headrace.config` turns
it into a ConfigError that names the setting. A source of chats is such a kind: lists of several settings hold it.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MiB = 1024 * 1024
LOWEST_TEMPERATURE = 0.01  # as in vLLM: lower ones end in overflow
MAX_SEED = 2**31 - 1  # what every generator takes
_MOST_LEVELS = 32  # of a free-form setting


def _no_truth(value: Any) -> Any:
    """Pydantic would read true as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def one_of_several(value: str) -> str:
    """K/N with K from 1 to N. Raises: ValueError."""
    part, slash, parts = value.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError("K/N with K from 1 to N is needed, such as 2/3")
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


class EngineConfig(Strict):
    """Servers that run the target, where target.engine is vllm."""

    folders: list[str] = Field(
        default_factory=list, description="folders of engine.json; empty: all under engines/ of the run's folder"
    )
    in_flight: Int = Field(16, ge=1, description="requests that one server works on at a time")
    timeout_s: Float = Field(600.0, gt=0, description="seconds that one request may take")
    retries: Int = Field(5, ge=0, description="further tries of a sample whose request failed for a passing cause")
    set_aside_s: Float = Field(30.0, gt=0, description="how long a server that keeps failing is left alone")
    queue_bytes: Int = Field(256 * 1024 * 1024, gt=0, description="encoded states that wait in one server")
    port: Int = Field(8100, ge=1, le=65535, description="where headrace engine serves, on loopback")
    flags: list[str] = Field(default_factory=list, description="further arguments of vllm serve")
    python: str | None = Field(None, description="the python of vLLM's environment; none: the one that runs headrace")


FUNCTION_CALL = "function_call"
ROLES = ("system", "developer", "user", "assistant", "tool")
# A turn that is nothing but a call to a tool has a role of its own in from/value data.
ALIASED_ROLES = (*ROLES, FUNCTION_CALL)


def known_roles(roles: dict[str, str]) -> dict[str, str]:
    """Aliases of roles. Raises: ValueError for one that stands for no role."""
    if wrong := sorted({role for role in roles.values() if role not in ALIASED_ROLES}):
        raise ValueError(f"roles among {sorted(ALIASED_ROLES)} are needed, not {wrong}")
    return roles


DEMO_DATA = "demo"  # the path of the built-in prompts


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


class ServeConfig(Strict):
    """The side that captures: `headrace serve`."""

    address: str = Field("127.0.0.1:8815", description="host:port to listen at; beyond loopback TLS is needed")
    token_file: str | None = Field(None, description="file with the readers' token; none means serve/token of the run")
    certificate: str | None = Field(None, description="PEM file; none means serve/cert.pem of the run, if it is there")
    key: str | None = Field(None, description="PEM file of its key; none means serve/key.pem of the run")
    client_ca: str | None = Field(None, description="PEM file; readers must show a certificate it signed (mutual TLS)")
    window_bytes: Int = Field(256 * MiB, ge=16 * MiB, description="bytes of answers on their way to readers")
    max_calls: Int = Field(256, ge=4, description="calls at once; more are told to come again")
    stall_s: Float = Field(20.0, gt=0, description="a reader that takes nothing for so long is cut off; it asks again")
    metrics_port: Int | None = Field(None, ge=0, le=65535, description="Prometheus text at this port of loopback")
    map_shards: bool = Field(
        False, description="with --stored, map shards instead of reading them: faster; a failing disk ends the server"
    )
    keep_share: Float | None = Field(
        None, ge=0, le=1, description="share of samples kept on disk; none means what store.max_bytes holds, or all"
    )
    ring_bytes: Int = Field(256 * MiB, gt=0, description="captured records held in memory for readers")
    workers: Int = Field(1, ge=1, description="processes that each run the target")
    part: Annotated[str, AfterValidator(one_of_several)] = Field(
        "1/1", description="K/N: capture only the samples that readers ask of the K-th of N servers"
    )
    ahead: Int = Field(256, ge=0, description="positions captured ahead of what readers ask for")
    capture_timeout_s: Float = Field(600.0, gt=0, description="a capture group that takes longer is captured anew")


class StreamConfig(Strict):
    """The side that trains, where `source` names servers."""

    token_file: str | None = Field(None, description="file with the token that the server wants")
    certificate: str | None = Field(None, description="PEM file to trust: the server's, or its authority's")
    client_certificate: str | None = Field(None, description="PEM file to show, where the server asks for one")
    client_key: str | None = Field(None, description="PEM file of its key")
    read_ahead_bytes: Int = Field(256 * MiB, gt=0, description="bytes of records held ahead of the step")
    request_bytes: Int = Field(8 * MiB, gt=0, description="bytes of one request; small records come together")
    silence_s: Float = Field(30.0, gt=0, description="a request that hears nothing for so long is made again")
    give_up_s: Float = Field(600.0, gt=0, description="stop when a server gives nothing for so long")


class EvaluateConfig(Strict):
    """Lossless speculative decoding, measured."""

    num_prompts: Int | None = Field(None, ge=1, description="held-out prompts; none means all")
    max_new_tokens: Int = Field(96, ge=1, description="tokens of each answer")
    temperature: Annotated[Float, AfterValidator(greedy_or_warm)] = Field(
        0.0, ge=0, description="0 is greedy, and checked token by token"
    )
    dtype: Literal["bfloat16", "float32"] = Field("float32", description="identity is promised in float32")
    tie_gap: Float = Field(1e-4, gt=0, description="top-2 logit gap up to which a first divergence counts as a tie")
    lookup_ngram: Int = Field(3, ge=1, description="longest n-gram of the prompt-lookup floor")
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="sampling")
