"""Windows, capture groups, positions and global steps: pure functions of (prepared data, seed, epoch).

In: the token lengths of a prepared set, known before any state exists. Out: which samples are captured together,
which sample stands at which position of an epoch, which positions make one global step, and which rank takes which.
No clock, no I/O, no global random state, so every reader of a run computes the same answer.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

Ints = npt.NDArray[np.int64]


def windows(num_samples: int, window_samples: int) -> list[range]:
    """Cut the prepared set into windows of consecutive rows; the last may be shorter.

    A window is the unit of shuffling, of capture and of shards.
    """
    if window_samples < 1:
        raise ConfigError("a window of at least one sample", str(window_samples), "raise order.window_samples")
    return [range(a, min(a + window_samples, num_samples)) for a in range(0, num_samples, window_samples)]


@dataclass(frozen=True)
class CaptureGroup:
    """Rows that are captured in one forward pass, always together: members, order and padding fix the bits."""

    window: int
    index: int
    rows: tuple[int, ...]
    padded_tokens: int


def capture_groups(
    lengths: Ints, window_samples: int, group_tokens: int, own: npt.NDArray[np.bool_] | None = None
) -> list[CaptureGroup]:
    """Group rows of similar length inside each window, at most `group_tokens` padded tokens a group (or one sample).

    Args:
        lengths: int64 [N], tokens of each row.
        group_tokens: members x longest member.
        own: bool [N], rows that are captured at all; None means every one.
    """
    groups: list[CaptureGroup] = []
    for w, window in enumerate(windows(len(lengths), window_samples)):
        rows = np.arange(window.start, window.stop)
        rows = rows if own is None else rows[own[rows]]
        longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
        start = index = 0
        while start < len(longest_first):
            padded = int(lengths[longest_first[start]])
            size = max(1, group_tokens // max(padded, 1))
            members = longest_first[start : start + size]
            groups.append(CaptureGroup(w, index, tuple(int(r) for r in members), padded))
            start, index = start + len(members), index + 1
    return groups


def epoch_order(eligible: npt.NDArray[np.bool_], window_samples: int, seed: int, epoch: int) -> Ints:
    """Rows in the order of one epoch: windows shuffled, then rows shuffled within each window.

    Args:
        eligible: bool [N], False for held-out rows; their places do not exist.
    Returns: int64 [P], the row at each position; P is the same in every epoch.
    """
    all_windows = windows(len(eligible), window_samples)
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    rows: list[Ints] = []
    for w in rng.permutation(len(all_windows)):
        window = np.arange(all_windows[w].start, all_windows[w].stop)
        rows.append(rng.permutation(window[eligible[window]]))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def global_steps(order: Ints, lengths: Ints, budget_tokens: int) -> list[tuple[int, int]]:
    """Cut an epoch into steps [a, b): consecutive positions whose known lengths fit the budget, at least one each.

    Holes do not move the cuts: lengths are those of the prepared set.
    """
    if budget_tokens < 1:
        raise ConfigError("a step of at least one token", str(budget_tokens), "raise train.step_tokens")
    steps: list[tuple[int, int]] = []
    start, filled = 0, 0
    for position, row in enumerate(order):
        tokens = int(lengths[row])
        if position > start and filled + tokens > budget_tokens:
            steps.append((start, position))
            start, filled = position, 0
        filled += tokens
    if len(order) > start:
        steps.append((start, len(order)))
    return steps


def split_over_ranks(step: tuple[int, int], order: Ints, lengths: Ints, num_ranks: int) -> list[list[int]]:
    """Deal the positions of one step to ranks, longest first, each to the rank with fewest tokens (lowest on a tie).

    Returns: one ascending list of positions a rank, together each position once; a list may be empty, and the
    rank takes part in the step all the same.
    """
    positions = np.arange(*step)
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap: fewest tokens first, then the lowest rank
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in positions[np.argsort(-lengths[order[positions]], kind="stable")]:
        tokens, rank = loads[0]
        shares[rank].append(int(position))
        heapq.heapreplace(loads, (tokens + int(lengths[order[position]]), rank))
    return [sorted(share) for share in shares]


def micro_batches(positions: Sequence[int], order: Ints, lengths: Ints, budget_tokens: int) -> list[list[int]]:
    """Cut one rank's share of a step into micro-batches of at most `budget_tokens` (or one sample), in order."""
    batches: list[list[int]] = []
    filled = 0
    for position in positions:
        tokens = int(lengths[order[position]])
        if not batches or filled + tokens > budget_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(position)
        filled += tokens
    return batches


def id_fraction(sample_id: bytes) -> float:
    """Where a sample lies in [0, 1) by the first 8 bytes of its id, which is a hash of its content."""
    return int.from_bytes(sample_id[:8], "big") / 2**64


def is_kept(sample_id: bytes, share: float) -> bool:
    """Whether a sample is of the kept subset: fixed by its content, the same in every epoch and on every server."""
    return id_fraction(sample_id) < share


def server_of(sample_id: bytes, num_servers: int) -> int:
    """Which server has a sample: other bits of its id than those that say whether it is kept."""
    return int.from_bytes(sample_id[8:], "little") % num_servers


def share_within(sample_ids: Iterable[bytes], sizes: Iterable[float], max_bytes: float) -> float:
    """The largest share whose kept subset takes at most `max_bytes`; `sizes` are bytes of each sample, same order."""
    filled = 0.0
    for fraction, size in sorted((id_fraction(own), size) for own, size in zip(sample_ids, sizes, strict=True)):
        filled += size
        if filled > max_bytes:
            return fraction
    return 1.0


def group_of_rows(groups: Sequence[CaptureGroup], num_rows: int) -> Ints:
    """int64 [N]: for each row, which of `groups` captures it; -1 for none."""
    found = np.full(num_rows, -1, dtype=np.int64)
    for k, group in enumerate(groups):
        found[list(group.rows)] = k
    return found
