"""Store, stream and bounded cache: what each takes, costs and is limited by.

In: bytes, rates, budgets and prices, all known. Out: one option for each way, codec and placement, feasible or with
what forbids it. A cache hits budget/size of every epoch after the first, whatever its policy, because every reuse
crosses an epoch's border: over E epochs it saves (E-1)/E x budget/size of all reads.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.plan.quantity import HOUR_S, bytes_text, money_text, time_text

Way = Literal["store", "stream", "cache"]
WAYS: tuple[Way, ...] = ("store", "stream", "cache")
AVAILABLE_WAYS: tuple[Way, ...] = ("store",)  # what this version can do; the others come with serve
Placement = Literal["apart", "in turns"]


@dataclass(frozen=True)
class Situation:
    """What options are computed from, for one codec and placement. Times are of one epoch, in seconds.

    `blocked` forbids every way; `blocked_together` those that run target and trainer side by side on the same cards.
    A price is None where nobody said it. Times may be infinite where `blocked` says why.
    """

    codec: str
    placement: Placement
    epochs: int
    size_bytes: float
    disk_bytes: float
    ram_bytes: float
    prefill_s: float
    link_s: float
    train_s: float
    read_s: float
    capture_usd_h: float | None
    train_usd_h: float | None
    keep_usd: float
    capture_fixed_s: float = 0.0
    train_fixed_s: float = 0.0
    blocked: tuple[str, ...] = ()
    blocked_together: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> float:
        """Room for states, on disk and in memory."""
        return self.disk_bytes + self.ram_bytes

    @property
    def kept_share(self) -> float:
        """Share of the data set that the budget holds."""
        return min(1.0, self.budget_bytes / self.size_bytes)


@dataclass(frozen=True)
class Times:
    """Seconds of one way; `held` are those for which GPUs are paid, `terms` what bounds an epoch."""

    first_s: float
    later_s: float
    wall_s: float
    capture_held_s: float
    train_held_s: float
    terms: dict[str, float]
    formula: str


@dataclass(frozen=True)
class Option:
    """One way with one codec at one placement."""

    way: Way
    codec: str
    placement: Placement
    feasible: bool
    blocked: tuple[str, ...]
    kept_bytes: float
    capture_passes: float
    saved_share: float
    times: Times
    usd: float | None
    limited_by: str

    def text(self) -> str:
        """In one line."""
        where = "captured apart" if self.placement == "apart" else "captured on the training GPUs in turns"
        head = f"{self.way}, {self.codec}, {where}"
        if not self.feasible:
            return f"{head}: not possible: {'; '.join(self.blocked)}"
        return f"{head}: {time_text(self.times.wall_s)}, {money_text(self.usd)}, limited by {self.limited_by}"


def hit_share(budget_bytes: float, size_bytes: float, epochs: int) -> float:
    """Share of all reads of a run that a cache of this budget serves: (E-1)/E x budget/size."""
    return (epochs - 1) / epochs * min(1.0, budget_bytes / size_bytes)


def evaluate_option(
    way: Way, situation: Situation, max_hours: float | None = None, max_usd: float | None = None
) -> Option:
    """Compute one way; what forbids it is listed, not raised."""
    share = {"store": 1.0, "stream": 0.0, "cache": situation.kept_share}[way]
    times = _TIMES[way](situation)
    usd = _usd(situation, times, share)
    blocked = [*situation.blocked, *_blocked(way, situation)]
    if max_hours is not None and times.wall_s > max_hours * HOUR_S:
        blocked.append(f"{time_text(times.wall_s)} exceed the {max_hours:g} h allowed")
    if max_usd is not None and usd is not None and usd > max_usd:
        blocked.append(f"{money_text(usd)} exceed the {money_text(max_usd)} allowed")
    passes = 1.0 if way == "store" else situation.epochs - (situation.epochs - 1) * share
    return Option(
        way=way,
        codec=situation.codec,
        placement=situation.placement,
        feasible=not blocked,
        blocked=tuple(blocked),
        kept_bytes=share * situation.size_bytes,
        capture_passes=passes,
        saved_share=1 - passes / situation.epochs,
        times=times,
        usd=usd,
        limited_by=max(times.terms, key=lambda k: times.terms[k]),
    )


def _blocked(way: Way, s: Situation) -> list[str]:
    found = []
    if way == "store" and s.size_bytes > s.budget_bytes:
        found.append(f"{bytes_text(s.size_bytes)} exceed the {bytes_text(s.budget_bytes)} there are")
    if way == "cache" and s.budget_bytes <= 0:
        found.append("no room to keep anything in")
    if way != "store" and s.placement == "in turns":
        found.extend(s.blocked_together)
    return found


def _store(s: Situation) -> Times:
    """Capture once, then train from what is kept; no GPU waits for another."""
    capture = max(s.prefill_s, s.link_s) + s.capture_fixed_s
    epoch = max(s.train_s, s.read_s)
    train = s.epochs * epoch + s.train_fixed_s
    held = (capture, train) if s.placement == "apart" else (0.0, capture + train)
    formula = f"{_h(capture)} of capture + {s.epochs} x {_h(epoch)} of training"
    terms = {
        "prefill": s.prefill_s,
        "the link": s.link_s,
        "training": s.epochs * s.train_s,
        "disk reads": s.epochs * s.read_s,
    }
    return Times(capture + epoch, epoch, capture + train, *held, terms, formula)


def _stream(s: Situation) -> Times:
    """Make the states of every epoch again, beside the trainer or in turns with it."""
    if s.placement == "apart":
        epoch = max(s.prefill_s, s.link_s, s.train_s)
        formula = (
            f"{s.epochs} x the longest of {_h(s.prefill_s)} prefill, {_h(s.link_s)} link, {_h(s.train_s)} training"
        )
    else:
        epoch = s.prefill_s + s.train_s
        formula = f"{s.epochs} x ({_h(s.prefill_s)} prefill + {_h(s.train_s)} training)"
    wall = s.epochs * epoch + s.capture_fixed_s + s.train_fixed_s
    held = (wall, wall) if s.placement == "apart" else (0.0, wall)
    terms = {"prefill": s.prefill_s, "the link": s.link_s, "training": s.train_s}
    return Times(epoch, epoch, wall, *held, terms, formula)


def _cache(s: Situation) -> Times:
    """Stream the first epoch, keep what fits, make the rest again."""
    missing = 1 - s.kept_share
    again = missing * s.prefill_s if missing else 0.0  # never 0 x infinity, where the target does not run
    parts = (again, missing * s.link_s, max(s.train_s, s.kept_share * s.read_s))
    rest = s.epochs - 1
    if s.placement == "apart":
        first, later = max(s.prefill_s, s.link_s, s.train_s), max(parts)
        wall = first + rest * later + s.capture_fixed_s + s.train_fixed_s
        held = (wall if missing else first + s.capture_fixed_s, wall)
        longest = f"{_h(parts[0])} prefill, {_h(parts[1])} link, {_h(parts[2])} training"
        formula = f"{_h(first)} + {rest} x the longest of {longest}"
    else:
        first, later = s.prefill_s + s.train_s, parts[0] + parts[2]
        wall = first + rest * later + s.capture_fixed_s + s.train_fixed_s
        held = (0.0, wall)
        formula = f"{_h(first)} + {rest} x ({_h(parts[0])} prefill + {_h(parts[2])} training)"
    terms = {"prefill": parts[0], "the link": parts[1], "training": s.train_s, "disk reads": s.kept_share * s.read_s}
    return Times(first, later, wall, *held, terms, formula)


_TIMES = {"store": _store, "stream": _stream, "cache": _cache}


def _usd(s: Situation, times: Times, kept_share: float) -> float | None:
    if s.train_usd_h is None or (s.placement == "apart" and s.capture_usd_h is None):
        return None
    gpu = times.train_held_s * s.train_usd_h + times.capture_held_s * (s.capture_usd_h or 0.0)
    return gpu / HOUR_S + s.keep_usd * kept_share


def _h(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.2f} h"
