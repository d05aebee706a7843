"""Records of samples whose states engines captured and encoded.

In: rows of a prepared set and engines that encode with the run's codec. Out: a record for each, made from a delivery
that was checked (ids, count, length of each part, finite, not constant, not repeating), or a refusal with its reason;
and a line now and then in `capture_metrics.jsonl`. What fails its check twice is refused for good. One sample of every
window is asked for twice: its raw states must give the engine's own predictions, and tell how the codec drifts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.capture.check import check_states, non_finite, repeated_rows
from headrace.capture.probe import logprobs_finding
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.codec.drift import Drift
from headrace.errors import CaptureError, CodecError
from headrace.files import append_json_line
from headrace.record import Record, Sample, make_record
from headrace.taps import FINAL_PRE_NORM, Tap, parse_tap
from headrace.target.channel import Delivery, DeliveryError, DeliveryRefused
from headrace.target.endpoints import Answer, Request, TooLong
from headrace.target.engine_target import EngineTarget, delivered_states, engine_head
from headrace.target.head import FrozenHead
from headrace.target.leases import Leases

METRICS = "capture_metrics.jsonl"
_METRIC_S = 10.0
PROBE_HINT = "run headrace probe, which names the cause"
PREDICTIONS = "the engine's own predictions from its last states"
MOST_TOKENS = 64  # of a window's sample, whose logprobs are compared
FEWEST_TOKENS = 2  # of a window's sample: the first token has no prediction
_DISTINCT_BITS = 512  # two tokens that share so many bits of features share them by a fault, not by chance


class BadStates(DeliveryRefused):
    """States of a sample that failed their check twice."""


class Unproved(DeliveryRefused):
    """A window's sample whose states are not what they should be: every record since the last one is in doubt."""


@dataclass(frozen=True)
class Refused:
    """A sample that no engine gave, and why; `permanent`: none will, later either."""

    sample: Sample
    reason: str
    permanent: bool


def check_predictions(
    states_TCH: torch.Tensor, ids: tuple[int, ...], answer: Answer, target: EngineTarget, head: FrozenHead
) -> None:
    """Hold the last states of a prompt's first tokens against the log-probabilities that came with them.

    Raises: Unproved where they do not give them. Without `final:pre_norm` among the columns nothing is compared.
    """
    if str(FINAL_PRE_NORM) in target.file.taps:
        final = states_TCH[:, target.file.taps.index(str(FINAL_PRE_NORM))]
        found = logprobs_finding(final, ids, answer.prompt_logprobs, head, target.spec.dtype, MOST_TOKENS)
        if not found.ok:
            raise Unproved(PREDICTIONS, found.cause, found.fix)


@dataclass(frozen=True, eq=False)
class Window:
    """Raw states [T, L, H] of a window's sample, which have passed."""

    sample: Sample
    states_TLH: torch.Tensor


@dataclass
class EngineCapture:
    """One capture from engines; a sample of each window of `window_samples` rows is proved on the way, once.

    `sample` gives a row's sample.
    """

    target: EngineTarget
    sample: Callable[[int], Sample]
    taps: tuple[Tap, ...]
    codec: Codec
    generation: int
    window_samples: int
    drift: Drift | None = None
    _leases: Leases[Record | Window] | None = None
    _bad: set[int] = field(default_factory=set)
    _head: FrozenHead | None = None
    _windows: set[int] = field(default_factory=set)

    def run(self, rows: Sequence[int], metrics: Path) -> Iterator[Record | Refused]:
        """What becomes of each row, once each, in the order the engines finish.

        Args: metrics: folder of `capture_metrics.jsonl`.
        Raises: TargetError when no engine is left; CaptureError when a window's sample is not what it should be.
        """
        self._head = self._head or engine_head(self.target)
        self._leases = Leases(self.target.endpoints, self.target.cfg, self._made)
        began = told = time.monotonic()
        for outcome in self._leases.run(self._requests(rows)):
            if isinstance(outcome.made, Window):
                if self.drift is not None:
                    self.drift.see(outcome.made.sample.row, outcome.made.sample.source, outcome.made.states_TLH)
            elif outcome.made is not None:
                yield outcome.made
            elif isinstance(outcome.error, Unproved):
                expected, found, hint = outcome.error.args
                told_of = f"{expected}, of row {-1 - outcome.number}, the sample of its window"
                raise CaptureError(told_of, found, f"{hint}; what is stored stays")
            elif outcome.number < 0:
                continue  # not answered at all: its row's own request will say so
            else:
                assert outcome.error is not None
                permanent = isinstance(outcome.error, TooLong | BadStates)
                expected, found, hint = outcome.error.args
                reason = f"{found} (expected {expected}): {hint}"
                yield Refused(self.sample(outcome.number), reason, permanent)
            if time.monotonic() - told >= _METRIC_S:
                told = time.monotonic()
                self._tell(metrics, told - began)
        self._tell(metrics, time.monotonic() - began)

    def figures(self) -> dict[str, int]:
        """Sums over the engines: in_flight, retries, failures, and set_aside where one was."""
        assert self._leases is not None
        own = self._leases.figures.values()
        found = {
            "in_flight": sum(one.in_flight for one in own),
            "retries": sum(one.num_retries for one in own),
            "failures": sum(one.num_failures for one in own),
            "set_aside": sum(one.num_set_aside for one in own),
        }
        return found if found["set_aside"] else {key: found[key] for key in ("in_flight", "retries", "failures")}

    def _tell(self, folder: Path, seconds: float) -> None:
        assert self._leases is not None
        engines = {
            name: {
                "tokens_s": round(one.tokens_s, 1),
                "num_tokens": one.num_tokens,
                "num_requests": one.num_requests,
                "in_flight": one.in_flight,
                "num_retries": one.num_retries,
                "num_failures": one.num_failures,
                "num_set_aside": one.num_set_aside,
            }
            for name, one in self._leases.figures.items()
        }
        tokens_s = round(sum(one["tokens_s"] for one in engines.values()), 1)
        append_json_line(folder / METRICS, {"seconds": round(seconds, 3), "tokens_s": tokens_s, "engines": engines})

    def _requests(self, rows: Sequence[int]) -> Iterator[tuple[int, Request]]:
        """A request for each row; before the first of a window another one, numbered -1 - row."""
        for row in rows:
            ids = tuple(self.sample(row).input_ids.tolist())
            window = row // self.window_samples
            if window not in self._windows and len(ids) >= FEWEST_TOKENS:
                self._windows.add(window)
                yield -1 - row, Request(ids, "states", prompt_logprobs=1)
            yield row, Request(ids)

    def _made(self, number: int, answer: Answer) -> Record | Window:
        """In a server's thread."""
        assert answer.delivery is not None
        if number < 0:
            return self._window(self.sample(-1 - number), answer)
        return self._record(number, answer.delivery)

    def _window(self, sample: Sample, answer: Answer) -> Window:
        """Raises: Unproved for states that do not give the engine's own predictions, or are not sound twice."""
        assert answer.delivery is not None
        assert self._head is not None
        file = self.target.file
        states = delivered_states(answer.delivery, file)
        wrong = check_states(states, sample.input_ids, [parse_tap(name) for name in file.taps], file.hidden_size)
        if wrong is not None:
            raise self._again(-1 - sample.row, Unproved)("sound states", wrong, PROBE_HINT)
        check_predictions(states, tuple(sample.input_ids.tolist()), answer, self.target, self._head)
        return Window(sample, states[:, file.encoded].to(TORCH_DTYPES[self.codec.spec.dtype]))

    def _record(self, row: int, delivery: Delivery) -> Record:
        """Raises: DeliveryError at a first fault of a row's states, BadStates at a second."""
        sample = self.sample(row)
        wrong = self.fault(sample, delivery)
        if wrong is not None:
            raise self._again(sample.row, BadStates)(f"sound states of row {sample.row}", wrong, PROBE_HINT)
        return make_record(sample, delivery.spans, delivery.parts, self.generation)

    def _again(self, number: int, kind: type[DeliveryError]) -> type[DeliveryError]:
        """The error of a number's second fault; of its first, one that is tried again."""
        first = number not in self._bad
        self._bad.add(number)
        return DeliveryError if first else kind

    def fault(self, sample: Sample, delivery: Delivery) -> str | None:
        """What is wrong with a delivered payload; None if nothing is. Counts and ids were checked on arrival."""
        if delivery.dtype != self.codec.spec.dtype:
            return f"states in {delivery.dtype}, not {self.codec.spec.dtype}"
        try:
            parts = [
                self.codec.features(part, end - start)
                for (start, end), part in zip(delivery.spans, delivery.parts, strict=True)
            ]
        except CodecError as exc:
            return f"{exc.args[1]} (expected {exc.args[0]})"
        features_TF = torch.cat(parts)
        if self.codec.spec.of_taps:
            states_TLH = self.codec.reconstruct(features_TF)
            return check_states(states_TLH, sample.input_ids, self.taps, self.codec.spec.hidden_size)
        features_T1F = features_TF[:, None]
        if (wrong := non_finite(features_T1F, ["features"])) is not None:
            return wrong
        if 8 * self.codec.spec.bytes_per_token() < _DISTINCT_BITS:
            return None
        return repeated_rows(features_T1F, sample.input_ids, ["features"])
