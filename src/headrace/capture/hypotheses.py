"""Which states are these? The stated tap against its neighbours, the stated token against the others.

In: captured columns of one text, and a reference forward pass at the stated taps and around them. Out: for each column
how far it is from what it should be, and where that is far, the neighbour that fits: another block, another side of
the final norm, another column, other tokens. Pure functions. Token 0 is left out: its norm hides everything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headrace.taps import EMBEDDING, FINAL_POST_NORM, FINAL_PRE_NORM, Tap

MARGIN = 3.0  # the stated tap must be so many times nearer than any neighbour
# Relative Frobenius error of the stated tap; two right engines in bfloat16 differ by up to 0.024 (docs/capture.md).
TOLERANCE = {"float32": 0.01, "float16": 0.02, "bfloat16": 0.05}
_NONE = 1e-7
_RUN_IT = "start the engine with headrace engine, which converts names to its numbers, and do not override its flags"

FIXES = {
    "early": _RUN_IT,
    "late": _RUN_IT,
    "normed": "take the last state before the final norm (final:pre_norm), and apply the norm where it is needed",
    "not normed": "apply the target's final norm, or store final:pre_norm under its own name",
    "column": "engines sort columns by depth: start the engine with headrace engine, which records the order",
    "rows": "the engine puts rows in wrong places: update it, or start it with --no-enable-chunked-prefill and "
    "--no-enable-prefix-caching",
    "other": "check that the engine serves the weights of target.model, and that it does not mix up requests",
}


@dataclass(frozen=True)
class Verdict:
    """How one column compares. `cause` is empty where the stated tap holds; `fix` says what to do."""

    tap: Tap
    error: float
    neighbour: str
    neighbour_error: float
    cause: str = ""
    fix: str = ""

    @property
    def ratio(self) -> float:
        """How many times nearer the stated tap is than its nearest neighbour."""
        return self.neighbour_error / max(self.error, _NONE)


def neighbours(tap: Tap, num_blocks: int) -> dict[Tap, str]:
    """Taps that a fault would give instead, with the fault's kind."""
    if tap == FINAL_PRE_NORM:
        return {Tap("after_block", num_blocks - 2) if num_blocks > 1 else EMBEDDING: "early", FINAL_POST_NORM: "normed"}
    if tap == FINAL_POST_NORM:
        return {FINAL_PRE_NORM: "not normed"}
    later = Tap("after_block", tap.block + 1)
    if later.block >= num_blocks:
        later = FINAL_POST_NORM
    found = {later: "normed" if later == FINAL_POST_NORM else "late"}
    if tap != EMBEDDING:
        found[Tap("after_block", tap.block - 1) if tap.block else EMBEDDING] = "early"
    return found


def needed_taps(columns: Sequence[Tap], num_blocks: int) -> list[Tap]:
    """The columns and all their neighbours, each once."""
    return list(dict.fromkeys([*columns, *(tap for column in columns for tap in neighbours(column, num_blocks))]))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, token 0 left out; both [T, ...], T >= 2."""
    wanted = expected[1:].float()
    return float((found[1:].float() - wanted).norm() / wanted.norm().clamp_min(_NONE))


def judge(
    states_TCH: torch.Tensor, columns: Sequence[Tap], reference: Mapping[Tap, torch.Tensor], num_blocks: int, dtype: str
) -> list[Verdict]:
    """A verdict for each column.

    Args: reference: states [T, H] at every tap of `needed_taps`. dtype: what the engine runs in.
    """
    verdicts = []
    for n, tap in enumerate(columns):
        own_TH = states_TCH[:, n]
        kinds = {**{other: "column" for other in columns if other != tap}, **neighbours(tap, num_blocks)}
        errors = {other: relative_error(own_TH, reference[other]) for other in kinds}
        # A block whose output a column of its own holds: the block is what a person looks for.
        nearest = min(errors, key=lambda other: errors[other])
        stated = relative_error(own_TH, reference[tap])
        told = Verdict(tap, stated, str(nearest), errors[nearest])
        if stated <= TOLERANCE[dtype] and told.ratio >= MARGIN:
            verdicts.append(told)
            continue
        cause, kind = _cause(own_TH, reference, told, nearest, kinds[nearest], dtype)
        verdicts.append(Verdict(tap, stated, str(nearest), errors[nearest], cause, FIXES[kind]))
    return _as_one(verdicts, columns)


def _cause(
    own_TH: torch.Tensor, reference: Mapping[Tap, torch.Tensor], told: Verdict, nearest: Tap, kind: str, dtype: str
) -> tuple[str, str]:
    """What the column holds instead, and the kind of fault."""
    if told.neighbour_error <= TOLERANCE[dtype] and told.neighbour_error * MARGIN <= told.error:
        how = {
            "early": "one block early",
            "late": "one block late",
            "normed": "the final norm was applied",
            "not normed": "the final norm was not applied",
            "column": "columns are not in the stated order",
        }
        return f"{told.tap} holds {nearest}: {how[kind]}", kind
    moved = moved_rows(own_TH, reference[told.tap], TOLERANCE[dtype])
    if moved:
        return f"{told.tap}: {moved}", "rows"
    if told.error <= TOLERANCE[dtype]:
        return f"{told.tap} cannot be told from {nearest}: {told.ratio:.2f} times nearer, not {MARGIN:g}", "other"
    return f"{told.tap} is none of its neighbours, relative error {told.error:.3f}: other weights or tokens", "other"


def _as_one(verdicts: list[Verdict], columns: Sequence[Tap]) -> list[Verdict]:
    """When columns only changed places the shift of a block explains nothing, and the other way round."""
    shifted = [v for v in verdicts if "one block" in v.cause]
    swapped = [v for v in verdicts if "stated order" in v.cause]
    held = sorted(v.neighbour for v in (*shifted, *swapped))
    if shifted and held == sorted(str(v.tap) for v in (*shifted, *swapped)):
        return [_renamed(v, "columns are not in the stated order", "column") if v.cause else v for v in verdicts]
    return verdicts


def _renamed(verdict: Verdict, how: str, kind: str) -> Verdict:
    cause = f"{verdict.tap} holds {verdict.neighbour}: {how}"
    return Verdict(verdict.tap, verdict.error, verdict.neighbour, verdict.neighbour_error, cause, FIXES[kind])


def moved_rows(found_TH: torch.Tensor, expected_TH: torch.Tensor, tolerance: float) -> str:
    """Name the first row that holds another token's states, or none's; empty when every row is in its place.

    Says nothing when fewer than half of the rows are any token's: then rows are not what is wrong.
    """
    found, expected = found_TH.float().nan_to_num(), expected_TH.float()
    distances = torch.cdist(found, expected) / expected.norm(dim=1).clamp_min(_NONE)
    nearest_T = distances.argmin(1)
    limit = 3 * tolerance  # of single rows, which vary more than their sum
    known_T = distances.gather(1, nearest_T[:, None])[:, 0] <= limit
    in_place_T = distances.diagonal() <= limit
    if in_place_T[1:].all() or known_T.float().mean() < 0.5:
        return ""
    wrong = int((~in_place_T).nonzero()[0])
    count = int((~in_place_T).sum())
    holds = f"the states of token {int(nearest_T[wrong])}" if known_T[wrong] else "no token's states"
    return f"rows out of place: token {wrong} holds {holds} ({count} of {len(found)} in all)"
