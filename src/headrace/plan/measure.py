"""Measured beats modelled: rates timed here replace those of the catalogue, and a finished run is laid beside its plan.

In: samples of timings, or what a run's stages recorded. Out: inputs with a measurement in them; rows of planned and
real. The timing itself belongs to whoever runs target and trainer; this room only reads its results.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from headrace.errors import PlanError
from headrace.plan.inputs import Measurement, PlanInputs
from headrace.plan.plan import Plan
from headrace.plan.quantity import bytes_text, time_text

# Real quantity -> the plan's figure, the share it may be off by.
LABELS = {
    "total_bytes": "states",
    "stored_bytes": "store",
    "capture_s": "capture",
    "train_s": "training",
    "decode_s": "regenerating",
}
CHECKED = {
    "total_bytes": ("total_bytes", 0.01),
    "stored_bytes": ("stored_bytes", 0.01),
    "capture_s": ("capture_s", 0.25),
    "train_s": ("train_s", 0.25),
    "decode_s": ("decode_s", 0.25),
}
_LARGEST = 1e300
_AGAIN = "make the plan again"


@dataclass(frozen=True)
class CheckRow:
    """One quantity, planned and real; `ratio` is real / planned."""

    name: str
    planned: float
    real: float
    ratio: float
    tolerance: float
    ok: bool

    def show(self, value: float) -> str:
        """A value of this quantity in units that people read."""
        return bytes_text(value) if self.name.endswith("bytes") else time_text(value)

    @property
    def difference(self) -> str:
        """How far the real value is from the planned one."""
        if not math.isfinite(self.ratio):
            return "none was planned"
        return f"{self.ratio - 1:+.1%}" if self.ratio < 10 else f"{self.ratio:,.0f} times"

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not finite as null."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}

    def text(self) -> str:
        """In one line."""
        verdict = "within" if self.ok else "NOT within"
        planned, real = self.show(self.planned), self.show(self.real)
        return (
            f"{LABELS[self.name]}: planned {planned}, real {real} ({self.difference}), {verdict} {self.tolerance:.0%}"
        )


def apply_measurement(inputs: PlanInputs, measured: Measurement) -> PlanInputs:
    """The same inputs, planned from measured rates."""
    return inputs.model_copy(update={"measured": measured})


def from_timings(
    machine: str,
    date: str,
    capture: Sequence[tuple[float, float]] = (),
    train: Sequence[tuple[float, float]] = (),
    decode: Sequence[tuple[float, float]] = (),
    capture_fixed_s: float = 0.0,
    train_fixed_s: float = 0.0,
) -> Measurement:
    """Make a measurement from runs of (tokens, seconds), the median of each kind. Raises: PlanError."""
    return Measurement(
        machine=machine,
        date=date,
        capture_tokens_s=_median_rate(capture, "capture"),
        train_tokens_s=_median_rate(train, "training"),
        decode_tokens_s=_median_rate(decode, "decoding"),
        capture_fixed_s=capture_fixed_s,
        train_fixed_s=train_fixed_s,
        num_runs=max(len(capture), len(train), len(decode), 1),
    )


def _median_rate(runs: Sequence[tuple[float, float]], what: str) -> float | None:
    if not runs:
        return None
    if any(tokens <= 0 or seconds <= 0 for tokens, seconds in runs):
        raise PlanError("runs of some tokens in some time", f"{what}: {list(runs)}", "time a longer slice")
    return median(tokens / seconds for tokens, seconds in runs)


def check(plan: Plan, real: Mapping[str, float]) -> tuple[CheckRow, ...]:
    """Put a plan beside what a run took. `real` holds any of CHECKED: payload and stored bytes, seconds of stages.

    `real["train_tokens"]`, if given, says how many tokens were trained on: a run that a limit ended early is laid
    beside that share of the planned time.
    Raises: PlanError for a quantity that no plan has, and where plan and run have none in common.
    """
    return check_figures({name: figure.value for name, figure in plan.figures.items()}, real)


def check_saved(saved: Mapping[str, Any], real: Mapping[str, float]) -> tuple[CheckRow, ...]:
    """As `check`, from the JSON of a saved plan; a figure saved as null was not known. Raises: PlanError."""
    plan = saved["plan"] if isinstance(saved.get("plan"), Mapping) else {}
    figures = plan.get("figures")
    if not isinstance(figures, Mapping):
        raise PlanError("a plan saved by this version, with its figures", repr(figures), _AGAIN)
    planned = {}
    for name, figure in figures.items():
        if not isinstance(figure, Mapping) or "value" not in figure:
            raise PlanError("a plan saved by this version", f"no value of {name}", _AGAIN)
        if figure["value"] is not None:
            planned[name] = finite(figure["value"], f"{name} of a saved plan", _AGAIN)
    if plan.get("codec", "raw") != "raw":  # a run counts its states raw, a plan as they are encoded
        planned.pop("total_bytes", None)
    return check_figures(planned, real)


def finite(value: Any, what: str, hint: str) -> float:
    """A finite number of JSON. Raises: PlanError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise PlanError(f"a number as {what}", repr(value), hint)
    return value


def check_figures(planned: Mapping[str, float], real: Mapping[str, float]) -> tuple[CheckRow, ...]:
    """Compare the planned figures with the real ones, by name."""
    real = dict(real)
    planned = {name: planned[figure] for name, (figure, _) in CHECKED.items() if figure in planned} | {
        "train_tokens": planned.get("train_tokens", 0.0)
    }
    trained = real.pop("train_tokens", planned["train_tokens"])
    if planned["train_tokens"] and "train_s" in planned:
        planned["train_s"] *= trained / planned["train_tokens"]
    unknown = sorted(set(real) - set(CHECKED))
    if unknown:
        raise PlanError(f"quantities among {', '.join(CHECKED)}", ", ".join(unknown), "see docs/plan.md")
    rows = []
    for name, value in real.items():
        if name in planned:
            ratio = value / planned[name] if planned[name] else float("inf")
            tolerance = CHECKED[name][1]
            rows.append(CheckRow(name, planned[name], value, ratio, tolerance, abs(ratio - 1) <= tolerance))
    if not rows:
        raise PlanError(
            "something both planned and done",
            f"planned {sorted(planned)}, done {sorted(real)}",
            "plan with the same inputs",
        )
    return tuple(rows)
