"""The proof that states are right, before a long capture starts.

In: whatever captures, a reference where the target fits here, and a few texts of the prepared set. Out: findings, each
with its figures and, where it failed, cause and fix; `probe.json` beside the run and a line in the manifest. Five
parts: logprobs, taps, requests, sound, hashes. Nothing here repairs anything.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.capture.check import check_states
from headrace.capture.hypotheses import MARGIN, TOLERANCE, Verdict, judge, needed_taps, relative_error
from headrace.capture.subjects import Ids, Reference, Subject
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.config import RunFolder
from headrace.errors import CaptureError
from headrace.files import read_json
from headrace.prepare.prepared import PreparedSet
from headrace.taps import FINAL_PRE_NORM, Tap
from headrace.target.channel import DeliveryError
from headrace.target.head import FrozenHead

PROBE_FILE = "probe.json"
# Mean absolute error of log-probabilities: what the rounding of logits alone gives.
LOGPROB_TOLERANCE = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.06}
ENCODED_TOLERANCE = 0.1  # of features, where states in the last bits fall into another step of the quantiser
MOST_TOKENS = 512  # of a text, whose logprobs are compared
_FEWEST_TOKENS = 8


Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `cause` and `fix` are empty where it holds."""

    part: str
    what: str
    ok: bool
    figures: Figures = field(default_factory=dict)
    cause: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """For programs, and for probe.json."""
        return asdict(self)


@dataclass(frozen=True)
class Texts:
    """What is asked: two texts, one that goes on as the first began, and one longer than a prefill chunk."""

    one: Ids
    other: Ids
    shared: Ids
    long: Ids


def choose_texts(prepared: PreparedSet, chunk_tokens: int, max_tokens: int | None) -> Texts:
    """Texts of a prepared set, cut to what the target has positions for.

    Raises: CaptureError for a set with too few tokens.
    """
    rows = sorted(range(prepared.num_samples), key=lambda row: -int(prepared.lengths[row]))
    longest = rows[: max(2, len(rows) // 2)]
    most = max_tokens or 10**9
    everything: list[int] = []
    for row in longest:
        everything.extend(prepared.sample(row).input_ids.tolist())
        if len(everything) > 2 * chunk_tokens:
            break
    one = tuple(prepared.sample(longest[0]).input_ids.tolist())[:most]
    other = tuple(prepared.sample(longest[len(longest) // 2]).input_ids.tolist())[:most]
    if min(len(one), len(other)) < _FEWEST_TOKENS:
        hint = "prepare longer samples"
        raise CaptureError(f"two samples of at least {_FEWEST_TOKENS} tokens", f"{len(one)} and {len(other)}", hint)
    shared = (*one[: 2 * len(one) // 3], *other)[:most]
    long = tuple(everything[: max(2 * _FEWEST_TOKENS, chunk_tokens * 5 // 4 + _FEWEST_TOKENS)])[:most]
    return Texts(one, other, shared, long)


class Probe:
    """One probe of one subject; `findings` grow as it goes."""

    def __init__(self, subject: Subject, reference: Reference | None, dtype: str) -> None:
        """Args: reference: None where the target does not fit here. dtype: what the subject runs the target in."""
        self.findings: list[Finding] = []
        self._subject, self._reference, self._dtype = subject, reference, dtype
        self._expected: dict[Ids, dict[Tap, torch.Tensor]] = {}

    def logprobs(self, ids: Ids, head: FrozenHead) -> torch.Tensor | None:
        """Part 1: log_softmax(head(norm(final))) against the engine's own. Returns: the states, for those after."""
        answer = self._asked("logprobs", "a text with the logprobs of its tokens", self._subject.with_logprobs, ids)
        if answer is None or not self._sound(answer[0], ids):
            return None
        states: torch.Tensor
        states, told = answer
        final = states[:, self._subject.columns.index(FINAL_PRE_NORM)]
        self.findings.append(logprobs_finding(final, ids, told, head, self._dtype))
        return states

    def taps(self, ids: Ids, states: torch.Tensor) -> None:
        """Part 2: each column against its stated tap and its neighbours, by a transformers forward."""
        if self._reference is None:
            skipped: Figures = {"skipped": "the target does not fit here beside what runs"}
            self.findings.append(Finding("taps", "states against a transformers forward", True, skipped))
            return
        for verdict in self._verdicts(ids, states):
            figures: Figures = {
                "error": round(verdict.error, 6), "neighbour": verdict.neighbour,
                "neighbour_error": round(verdict.neighbour_error, 6), "ratio": round(verdict.ratio, 2),
            }  # fmt: skip
            ok = not verdict.cause
            self.findings.append(Finding("taps", str(verdict.tap), ok, figures, verdict.cause, verdict.fix))

    def encoded(self, ids: Ids, states: torch.Tensor, codec: Codec, taps: Sequence[Tap]) -> None:
        """Part 2, encoded: features of what the engine encoded against those of the reference's states, P h_ref."""
        features = self._asked(
            "taps", "a text, encoded", lambda own: self._subject.features(own, codec), ids, none_is_fine=True
        )
        if features is None:
            return
        columns = [self._subject.columns.index(tap) for tap in taps]
        chosen = states[:, columns] if self._reference is None else self._expected_states(ids, taps)
        dtype = TORCH_DTYPES[codec.spec.dtype]

        def error(order: Sequence[int]) -> float:
            own = chosen[:, list(order)].to(dtype)
            return relative_error(features, codec.features(codec.encode(own), len(ids)))

        stated = error(range(len(taps)))
        others = [[*range(k, len(taps)), *range(k)] for k in range(1, len(taps))] + [list(range(len(taps)))[::-1]]
        nearest = min((error(order) for order in others if order != list(range(len(taps)))), default=float("inf"))
        ok = len(features) == len(ids) and stated <= ENCODED_TOLERANCE and (stated * MARGIN <= nearest)
        figures: Figures = {"error": round(stated, 6), "taps_in_another_order": round(min(nearest, 1e9), 6)}
        cause = "" if ok else f"encoded states are not those of the codec at the stated taps: error {stated:.3f}"
        if not ok and nearest * MARGIN <= stated:
            cause = "encoded states are of the stated taps in another order"
        fix = "" if ok else "start the engine again from this run file: its codec, basis or order of taps is another"
        self.findings.append(Finding("taps", "encoded states", ok, figures, cause, fix))

    def requests(self, texts: Texts, first: Mapping[Ids, torch.Tensor]) -> None:
        """Part 3: plain requests, as a capture makes them: repeated, shared prefix, chunked, together, aborted.

        Args: first: states of requests that skipped the cache, for where there is no reference.
        """
        asked = [
            ("a text that was asked before", texts.one),
            ("a text with a prefix that was asked before", texts.shared),
            ("a text longer than a prefill chunk", texts.long),
        ]
        self._plain(asked, 1, first)
        mixed = [("several at once, in odd order", ids) for ids in (texts.long, texts.one, texts.other, texts.shared)]
        self._plain([*mixed, *mixed[:0:-1]], self._subject.together, first)
        self._subject.abort(texts.long)
        self._plain([("a text after one that was aborted", texts.other)], 1, first)

    def _plain(self, asked: Sequence[tuple[str, Ids]], together: int, first: Mapping[Ids, torch.Tensor]) -> None:
        """Ask, so many at a time, then look at what came."""

        def timed(one: tuple[str, Ids]) -> tuple[torch.Tensor | None, float]:
            began = time.monotonic()
            return self._asked("requests", one[0], self._subject.states, one[1]), time.monotonic() - began

        with ThreadPoolExecutor(together) as pool:
            came = list(pool.map(timed, asked))
        for (what, ids), (states, seconds) in zip(asked, came, strict=True):
            if states is not None and self._sound(states, ids):
                self.findings.append(self._plain_finding(what, ids, states, seconds, first))

    def _plain_finding(
        self, what: str, ids: Ids, states: torch.Tensor, seconds: float, first: Mapping[Ids, torch.Tensor]
    ) -> Finding:
        figures: Figures = {
            "num_tokens": len(ids), "tokens_s": round(len(ids) / max(seconds, 1e-9), 1)
        }  # fmt: skip
        cause = fix = ""
        if self._reference is not None:
            wrong = next((verdict for verdict in self._verdicts(ids, states) if verdict.cause), None)
            cause, fix = ("", "") if wrong is None else (wrong.cause, wrong.fix)
        elif ids in first:
            error = relative_error(states, first[ids])
            figures["error"] = round(error, 6)
            if error > TOLERANCE[self._dtype]:
                cause = "the same text has other states than in a request that skipped the cache"
                fix = "start the engine with --no-enable-prefix-caching, or update it"
        return Finding("requests", what, not cause, figures, cause, fix)

    def _verdicts(self, ids: Ids, states: torch.Tensor) -> list[Verdict]:
        assert self._reference is not None
        self._expected_states(ids, ())
        return judge(states, self._subject.columns, self._expected[ids], self._reference.num_blocks, self._dtype)

    def _expected_states(self, ids: Ids, taps: Sequence[Tap]) -> torch.Tensor:
        assert self._reference is not None
        if ids not in self._expected:
            needed = needed_taps(self._subject.columns, self._reference.num_blocks)
            self._expected[ids] = self._reference.states(ids, needed)
        own = self._expected[ids]
        return torch.stack([own[tap] for tap in taps], 1) if taps else torch.empty(0)

    def _asked(self, part: str, what: str, ask: Callable[[Ids], Any], ids: Ids, none_is_fine: bool = False) -> Any:
        """What came, or None with a finding: counts and ids are checked on arrival (part 4)."""
        try:
            found = ask(ids)
        except DeliveryError as exc:
            figures: Figures = {"num_tokens": len(ids), "expected": str(exc.args[0])}
            self.findings.append(Finding(part, what, False, figures, str(exc.args[1]), str(exc.args[2])))
            return None
        assert found is not None or none_is_fine
        return found

    def _sound(self, states: torch.Tensor, ids: Ids) -> bool:
        """Part 4: finite, not zero, not constant, not repeating."""
        wrong = check_states(states, torch.tensor(ids).numpy(), self._subject.columns, states.shape[-1])
        if wrong is None:
            return True
        fix = "update the engine, or lower what it runs at a time (--max-num-seqs); zero rows: its cache's block sizes"
        self.findings.append(Finding("sound", "finite, not zero, not repeating", False, {}, wrong, fix))
        return False


def logprobs_finding(
    final_TH: torch.Tensor,
    ids: Ids,
    told: Sequence[Mapping[int, float]],
    head: FrozenHead,
    dtype: str,
    most_tokens: int = MOST_TOKENS,
) -> Finding:
    """Compare what the head makes of last states with the log-probabilities that the engine told of the text.

    Args: most_tokens: no more are looked at, from the first on: a head of a large vocabulary is slow on a CPU.
    """
    final_TH, ids, told = final_TH[:most_tokens], ids[:most_tokens], told[:most_tokens]
    what = "log_softmax(head(norm(final))) against the engine's prompt logprobs"
    expected = torch.tensor([row[token] for row, token in zip(told[1:], ids[1:], strict=True)])

    given = torch.tensor(ids)

    def error(normed_TH: torch.Tensor, ahead: int) -> float:
        """As if row t held the state of token t + ahead."""
        rows = torch.arange(max(0, -ahead), len(ids) - 1 - max(0, ahead))
        own = head_logits(head, normed_TH)[rows].log_softmax(-1).gather(1, given[rows + ahead + 1][:, None])[:, 0]
        return float((own - expected[rows + ahead]).abs().mean())

    bare = final_TH.to(head.head_VH.dtype)
    normed = head.normed(final_TH)
    stated = error(normed, 0)
    hypotheses = {
        "the final norm was applied already": error(bare, 0),
        "rows are one token early": error(normed, 1),
        "rows are one token late": error(normed, -1),
    }
    nearest = min(hypotheses, key=lambda name: hypotheses[name])
    limit = LOGPROB_TOLERANCE[dtype]
    figures: Figures = {
        "error": round(stated, 6),
        "limit": limit,
        "nearest": nearest,
        "its_error": round(hypotheses[nearest], 6),
    }
    if stated <= limit:
        return Finding("logprobs", what, True, figures)
    if hypotheses[nearest] <= limit:
        return Finding("logprobs", what, False, figures, f"final:pre_norm: {nearest}", _FINAL_FIX)
    cause = "the last captured state does not give the engine's own predictions: another block, or other tokens' rows"
    return Finding("logprobs", what, False, figures, cause, _FINAL_FIX)


def head_logits(head: FrozenHead, normed_TH: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] in float32, with the target's own scale and soft cap."""
    logits = (normed_TH @ head.head_VH.T).float() * head.logit_scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


_FINAL_FIX = "start the engine with headrace engine, which asks for the last block's output before the final norm"


def kept_probe(folder: RunFolder) -> dict[str, Any] | None:
    """What a manifest says of the last probe; None where there was none."""
    path = folder.root / PROBE_FILE
    if not path.is_file():
        return None
    found = read_json(path, f"remove {path}, and run headrace probe")
    return {key: found.get(key) for key in ("ok", "made", "num_findings", "failed")}


def failed(findings: Sequence[Finding]) -> list[Finding]:
    """Those that do not hold."""
    return [finding for finding in findings if not finding.ok]


def raise_failed(findings: Sequence[Finding], where: Path) -> None:
    """Raise CaptureError with the cause and fix of each different failure."""
    wrong: dict[tuple[str, str], Finding] = {}
    for finding in failed(findings):
        wrong.setdefault((finding.cause, finding.fix), finding)
    if wrong:
        told = "; ".join(f"{finding.part} ({finding.what}): {finding.cause}" for finding in wrong.values())
        hint = "; ".join(dict.fromkeys(finding.fix for finding in wrong.values()))
        raise CaptureError("states that are proved right", told, f"{hint} (all of it in {where})")
