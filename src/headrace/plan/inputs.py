"""Everything a plan is made from.

In: what a person or a program says. Out: one frozen, closed set of inputs. What is not said has its default here, once;
what cannot be defaulted is None, and the plan says what it left out or assumed.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from headrace.errors import ConfigError, PlanError
from headrace.kinds import Strict
from headrace.plan.geometry import Geometry
from headrace.taps import FINAL_PRE_NORM, Tap, default_taps, from_zlab, parse_tap, parse_taps

# Far beyond any run, and small enough that no product of a plan leaves the range of numbers.
_MOST = 10**12
Count = Annotated[int, Field(ge=1, le=_MOST)]
Mean = Annotated[float, Field(le=_MOST)]


class Measurement(Strict):
    """Rates timed on the machine and target of the plan; they replace modelled ones. Medians of several runs.

    `fixed` times are what a stage takes however little there is to do: loading, compiling, evaluating.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    machine: str = Field(description="what was timed, in words")
    date: str = Field(description="when")
    capture_tokens_s: float | None = Field(None, gt=0, description="tokens captured and stored a second")
    train_tokens_s: float | None = Field(None, gt=0, description="tokens of training samples a second")
    decode_tokens_s: float | None = Field(None, gt=0, description="answer tokens a second, all streams together")
    capture_fixed_s: float = Field(0.0, ge=0)
    train_fixed_s: float = Field(0.0, ge=0)
    num_runs: int = Field(1, ge=1, description="how many runs the medians are of")


class PlanInputs(Strict):
    """Inputs of one plan. Sizes and rates may be numbers or texts such as `4 TB` and `1 Gbit/s`."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = Field(None, description="demo, a folder, a config.json or a hub id")
    hidden_size: Count | None = Field(None, description="plain numbers instead of a config.json")
    num_blocks: Count | None = Field(None, description="plain numbers instead of a config.json")
    params_billion: float | None = Field(None, gt=0, le=_MOST, description="plain numbers instead of a config.json")
    active_params_billion: float | None = Field(None, gt=0, le=_MOST, description="of a mixture of experts")

    prepared: Path | None = Field(None, description="a prepared set: exact lengths")
    chats: Path | None = Field(None, description="a JSONL file of chats: sampled")
    num_samples: int | None = Field(None, le=_MOST, description="how many samples")
    mean_tokens: Mean | None = Field(None, description="tokens of a sample, prompt and answer")
    mean_prompt: Mean | None = Field(None, description="prompt tokens of a sample")
    mean_answer: Mean | None = Field(None, description="answer tokens of a sample")
    heldout_share: float = Field(
        0.0, ge=0, lt=1, description="captured but not trained on; a prepared set knows its own"
    )

    taps: list[str] | None = Field(
        None, description="tap names, or numbers as z-lab counts; none means the default rule"
    )
    num_taps: int = Field(5, ge=1, le=1000, description="taps of the default rule")
    final_state: bool = Field(False, description="the target's last state beside the taps")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of the states")
    codec: str = Field(
        "raw", description="the codec of the plan's main figures: a name, the folder of a fitted one, or auto"
    )
    store_bytes: int | None = Field(
        None, ge=1, description="room of the store, by which auto chooses; none: disk_budget"
    )
    codecs: list[str] | None = Field(None, description="codecs to compare; none means the usual ones")

    drafter: Path | None = Field(None, description="config.json of a published DFlash drafter")
    num_layers: int | None = Field(None, ge=1, le=1000, description="decoder layers of the drafter; none: derived")
    block_size: int | None = Field(
        None, ge=2, le=_MOST, description="tokens of a block, the anchor included; none: derived"
    )
    intermediate_size: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    epochs: Count = Field(6, description="visits of every sample")
    anchors: Count = Field(512, description="blocks drawn from each sample at each visit")

    capture_gpu: str | None = Field(None, description="GPUs that run the target: h100-sxm or rtx-pro-6000:2")
    train_gpu: str | None = Field(None, description="GPUs that train; none means those that run the target, in turns")
    target_dtype: Literal["bfloat16", "fp8", "nvfp4"] = Field("bfloat16", description="the target's weights")
    link: str | float | None = Field(None, description="between the two sets of GPUs; none means not a limit")
    disk: str = Field("nvme-gen4", description="kind of disk or object store")
    disk_budget: str | float | None = Field(
        None, description="room on a disk that is there already; none: bought to size"
    )
    ram_budget: str | float = Field(0.0, description="memory of the trainer's host that may hold states")
    months: float = Field(1.0, gt=0, description="how long rented storage is kept")
    read_ahead: int = Field(64, ge=0, le=_MOST, description="samples decoded ahead of the step")
    decode_tokens_s: float | None = Field(None, gt=0, description="answer tokens a second of one stream")
    num_streams: Count = Field(1, description="streams that answer side by side")
    max_hours: float | None = Field(None, gt=0)
    max_usd: float | None = Field(None, gt=0)
    catalogue: Path | None = Field(None, description="a file laid over the packaged catalogue")
    measured: Measurement | None = Field(None, description="rates that replace modelled ones")


def make_inputs(**values: Any) -> PlanInputs:
    """Check inputs that come from flags or a file. Raises: PlanError naming each input that cannot be used."""
    try:
        return PlanInputs.model_validate(values)
    except ValidationError as exc:
        parts = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (found {e['input']!r:.40})" for e in exc.errors()
        )
        raise PlanError("inputs that a plan knows", parts, "see docs/plan.md or headrace plan --help") from exc


def split_taps(text: str) -> list[str]:
    """Split the value of `--taps` at its commas. Raises: PlanError for an empty list."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise PlanError(
            "tap names or z-lab numbers, separated by commas", repr(text), "for example --taps 1,16,31,46,61"
        )
    return found


def choose_taps(
    items: list[str] | None, num_taps: int, target: Geometry, final_state: bool = False
) -> tuple[tuple[Tap, ...], tuple[str, ...]]:
    """Read taps, and say what was read as what. A bare number is z-lab's: the output of that block, counted from 0.

    Raises: PlanError for anything else, for repeated taps and for blocks beyond the target's depth.
    """
    try:
        if items is None:
            taps = default_taps(target.num_blocks, num_taps) + ((FINAL_PRE_NORM,) if final_state else ())
            return taps, (f"no taps were named: z-lab's default rule places {', '.join(map(str, taps))}",)
        named = [str(_one_tap(item, target.num_blocks)) for item in items]
        taps = parse_taps(named, target.num_blocks)
    except ConfigError as exc:
        raise PlanError(*exc.args) from exc
    numbers = [item for item in items if _is_number(item)]
    taps = (*taps, FINAL_PRE_NORM) if final_state and FINAL_PRE_NORM not in taps else taps
    if not numbers:
        return taps, ()
    return taps, (f"numeric taps are read as z-lab's numbers: {', '.join(numbers)} means {', '.join(map(str, taps))}",)


def _one_tap(item: str, num_blocks: int) -> Tap:
    return from_zlab(int(item), num_blocks) if _is_number(item) else parse_tap(item)


def _is_number(item: str) -> bool:
    return item.isascii() and item.removeprefix("-").isdecimal()
