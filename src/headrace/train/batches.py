"""Global steps of a run, read and decoded ahead.

In: a prepared set, an order and a source of records. Out: for each global step from any position on, its samples with
features and anchors, cut into micro-batches; of a rank of several, its share. A thread decodes at most `read_ahead`
samples ahead; the time a step waits for it is measured. Holes are left out and counted; held-out rows have no position,
so they are never asked for.
"""

import queue
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.codec.base import Codec, record_features
from headrace.config import OrderConfig, TrainConfig
from headrace.drafter.anchors import anchor_rng, draw_anchors
from headrace.errors import TrainError
from headrace.order import epoch_order, global_steps, micro_batches, split_over_ranks
from headrace.prepare.prepared import PreparedSet
from headrace.record import Record, Sample
from headrace.source import Hole, Position, Source
from headrace.token_rule import ALL_TOKENS, TokenRule
from headrace.train.ranks import WHOLE, Share

Ints = npt.NDArray[np.int64]
SUPERVISED = TokenRule("supervised")
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class TrainSample:
    """A sample with its features ([T, 0] for the floor), the target's last states, and a visit's anchors int64 [A].

    Features and last states as in `Read`.
    """

    sample: Sample
    features_TF: torch.Tensor
    anchors_A: Ints
    final_TH: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @property
    def name(self) -> str:
        """How errors name it."""
        return name_of(self.sample.row, self.sample.id)


def name_of(row: int, sample_id: bytes) -> str:
    """A sample as people and programs find it again."""
    return f"row {row} (id {sample_id.hex()})"


@dataclass(frozen=True, eq=False)
class Step:
    """One global step: positions [start, end) of an epoch, its samples in micro-batches, holes left out.

    `draw` counts the updates made at these positions; from 1 on the samples are those of a recent step.
    """

    epoch: int
    start: int
    end: int
    micro: list[list[TrainSample]]
    holes: list[Hole] = field(default_factory=list)
    waited_s: float = 0.0
    draw: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of its samples."""
        return sum(s.sample.num_tokens for batch in self.micro for s in batch)


@dataclass(frozen=True)
class Plan:
    """Which positions make which step: the same in every process and after every restart."""

    lengths: Ints
    eligible: npt.NDArray[np.bool_]
    order: OrderConfig
    step_tokens: int
    epochs: int

    def rows(self, epoch: int) -> Ints:
        """The row at each position of an epoch."""
        return epoch_order(self.eligible, self.order.window_samples, self.order.seed, epoch)

    def steps(self, epoch: int) -> list[tuple[int, int]]:
        """The steps [start, end) of an epoch."""
        return global_steps(self.rows(epoch), self.lengths, self.step_tokens)

    def places(self, step: tuple[int, int], rows: Ints, share: Share) -> Sequence[int]:
        """The positions of a step that a rank takes, ascending. Args: rows: the row at each position of the epoch."""
        if share.size == 1:
            return range(*step)
        return split_over_ranks(step, rows, self.lengths, share.size)[share.rank]

    def num_steps(self) -> int:
        """Steps of all epochs."""
        return sum(len(self.steps(epoch)) for epoch in range(self.epochs))

    def after(self, epoch: int, end: int) -> tuple[int, int]:
        """The position that follows `end`: it, or the first of the next epoch."""
        return (epoch, end) if end < int(self.eligible.sum()) else (epoch + 1, 0)


def plan_steps(prepared: PreparedSet, order: OrderConfig, cfg: TrainConfig) -> Plan:
    """Plan the steps over every row that is not held out.

    Raises: TrainError when no row is left to train on.
    """
    eligible = ~np.asarray(prepared.heldout, dtype=bool)
    if not eligible.any():
        raise TrainError("samples to train on", "every row is held out", "lower prepare.heldout_fraction or add chats")
    lengths = np.asarray(prepared.lengths, dtype=np.int64)
    return Plan(lengths, eligible, order, cfg.step_tokens, cfg.epochs)


class Read(NamedTuple):
    """A sample with what training reads of it: features [S, F] and the target's last states [S', H].

    S is the last anchor that can be drawn, S' one more: tokens behind have no part in any block, and a store need not
    hold them. The first `start` rows are zero where a store has none. Either is [T, 0] where there are none at all.
    """

    sample: Sample
    features_TF: torch.Tensor
    final_TH: torch.Tensor
    start: int = 0


class Reader:
    """Samples with their features, by position; without a source, samples alone (the floor reads no state)."""

    def __init__(
        self,
        prepared: PreparedSet,
        source: Source | None,
        codec: Codec | None,
        num_features: int | None = None,
        rule: TokenRule = ALL_TOKENS,
    ) -> None:
        """Args:
        num_features: columns that are the drafter's; the rest are the target's last state. None: all.
        rule: which tokens of a sample have states.
        """
        self._prepared = prepared
        self._source = source
        self._codec = codec
        self._num_features = num_features
        self._rule = rule

    def read(self, positions: Iterable[Position]) -> Iterator[Read | Hole]:
        """Yield one item for each position, in order.

        Raises: TrainError for a record of another sample, or with a feature that is not finite.
        """
        if self._source is None or self._codec is None:
            for position in positions:
                sample = self._prepared.sample(position.row)
                nothing = torch.zeros(sample.num_tokens, 0)
                yield Read(sample, nothing, nothing)
            return
        for item in self._source.records(positions):
            if isinstance(item, Hole):
                yield item
            else:
                sample = self._prepared.sample(item.row)
                columns = decode_features(item, sample, self._codec, self._rule)
                width = columns.shape[1] if self._num_features is None else self._num_features
                start, _ = self._rule.span(sample.loss_mask)
                _, end = SUPERVISED.span(sample.loss_mask)
                features_TF, final_TH = columns[: max(end - 1, 0), :width], columns[:end, width:]
                yield Read(sample, features_TF, final_TH, start)


def decode_features(record: Record, sample: Sample, codec: Codec, rule: TokenRule = ALL_TOKENS) -> torch.Tensor:
    """Decode a record to features [T, F] and check them.

    Tokens that the rule leaves out at the end are not among the T; those before a window are zero, and never seen.
    Raises: TrainError naming the sample when ids differ from the prepared set's or a feature is not finite.
    """
    name = name_of(sample.row, sample.id)
    start, end = rule.span(sample.loss_mask)
    if record.id != sample.id or not np.array_equal(record.input_ids, sample.input_ids[start:end]):
        raise TrainError(
            f"the states of {name}", f"a record of {name_of(record.row, record.id)}", "capture this prepared set again"
        )
    features_TF = record_features(record, codec)
    finite_T = torch.isfinite(features_TF).all(dim=-1)
    if not bool(finite_T.all()):
        token = int((~finite_T).nonzero()[0])
        raise TrainError(
            f"finite features in {name}",
            f"NaN or infinity at token {start + token} of {sample.num_tokens}",
            "remove the states folder's record and capture it again",
        )
    return features_TF if not start else torch.cat((features_TF.new_zeros(start, features_TF.shape[1]), features_TF))


def training_steps(
    plan: Plan,
    reader: Reader,
    prepared: PreparedSet,
    cfg: TrainConfig,
    start: tuple[int, int],
    known_holes: set[int],
    share: Share = WHOLE,
    declared: Collection[int] = (),
) -> Generator[Step, None, None]:
    """Yield the steps from position `start` = (epoch, place) to the end of the last epoch.

    Args:
        known_holes: rows declared holes before; they are not asked for again.
        share: of every step only this rank's samples.
        declared: holes that other ranks found meanwhile, looked at as steps are cut; their samples are left out.
    """
    for epoch in range(start[0], plan.epochs):
        rows = plan.rows(epoch)
        first = start[1] if epoch == start[0] else 0
        steps = [(a, b) for a, b in plan.steps(epoch) if a >= first]
        wanted = (
            Position(epoch, place, int(rows[place]), prepared.sample_id(int(rows[place])))
            for step in steps
            for place in plan.places(step, rows, share)
            if int(rows[place]) not in known_holes
        )
        with closing(read_ahead(reader.read(wanted), cfg.read_ahead)) as items:
            for a, b in steps:
                places = plan.places((a, b), rows, share)
                taken = _take(plan, cfg, (epoch, rows), places, known_holes, declared, items)
                yield Step(epoch, a, b, *taken)


def _take(
    plan: Plan,
    cfg: TrainConfig,
    visit: tuple[int, Ints],
    places: Sequence[int],
    known_holes: set[int],
    declared: Collection[int],
    items: Iterator[Read | Hole],
) -> tuple[list[list[TrainSample]], list[Hole], float]:
    """Take one step's samples from the reader and cut them into micro-batches by their known lengths.

    Args: visit: the epoch, and the row at each of its positions.
    Returns: micro-batches, holes, and the seconds waited.
    """
    epoch, rows = visit
    began = time.monotonic()
    samples: dict[int, TrainSample] = {}
    holes: list[Hole] = []
    for place in places:
        row = int(rows[place])
        if row in known_holes:
            continue
        item = next(items)
        if row in declared:
            continue
        if isinstance(item, Hole):
            holes.append(item)
            continue
        sample, features_TF, final_TH, _ = item
        anchors_A = draw_anchors(sample.loss_mask, cfg.anchors, anchor_rng(cfg.seed, epoch, row))
        if len(anchors_A):
            samples[place] = TrainSample(sample, features_TF, anchors_A, final_TH)
    waited_s = time.monotonic() - began
    cuts = micro_batches(places, rows, plan.lengths, cfg.micro_tokens)
    micro = [[samples[place] for place in cut if place in samples] for cut in cuts]
    return [batch for batch in micro if batch], holes, waited_s


class _End:
    """Last item of a queue: the iterator is exhausted, or has failed."""


def read_ahead(items: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """Run an iterator in a thread, at most `depth` items ahead; its error is raised here, in its place.

    Closing the generator stops the thread.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(depth)
    stopped = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="headrace-decode") as pool:
        filling = pool.submit(_fill, items, ready, stopped)
        try:
            while not isinstance(item := ready.get(), _End):
                yield item
            filling.result()
        finally:
            stopped.set()


def _fill(items: Iterator[Item], ready: "queue.Queue[Item | _End]", stopped: threading.Event) -> None:
    try:
        for item in items:
            if not _put(ready, item, stopped):
                return
    finally:
        _put(ready, _End(), stopped)


def _put(ready: "queue.Queue[Item | _End]", item: Item | _End, stopped: threading.Event) -> bool:
    """Wait for room, but not for a reader that has gone; say whether the item was taken."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.05)
        except queue.Full:
            continue
        return True
    return False
