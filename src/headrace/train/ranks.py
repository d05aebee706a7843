"""The processes of one run: what they add up, and what the first of them decides for all.

In: the environment that `torchrun` sets. Out: sums of numbers and of gradients, the first rank's decisions and tensors
on every rank. Gradients are added explicitly after the micro-batches (docs/decisions/0007). A run of one process has
`ALONE`, whose every answer is what it was given, so nothing of torch.distributed is touched.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from headrace.errors import HeadraceError, TrainError
from headrace.train.watch import Watch

Value = TypeVar("Value")
# Silence is found by the watch, in seconds. A collective itself may wait as long as a source may stall.
PATIENCE = timedelta(hours=6)
MEET = timedelta(minutes=10)
BUCKET_BYTES = 64 * 1024 * 1024  # gradients that are added up in one message
_AGAIN = "the same command goes on from the last checkpoint"


@dataclass(frozen=True)
class Share:
    """Which part of every global step a process takes: that of `rank` among `size`."""

    rank: int = 0
    size: int = 1


WHOLE = Share()


class Ranks:
    """One process alone."""

    share = WHOLE

    @property
    def first(self) -> bool:
        """Whether this rank decides what exists, and writes it."""
        return self.share.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number added up over the ranks, in float64."""
        return list(values)

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, in order."""
        return [value]

    def decide(self, value: Value) -> Value:
        """The first rank's value; what the others give is not looked at."""
        return value

    def spread(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The first rank's tensors, wherever the ranks' devices are; CPU tensors come back as CPU tensors."""
        return dict(tensors)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over the ranks; a parameter that has one nowhere keeps none."""

    def owned(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that this rank updates, and whose moments it holds."""
        return list(parameters)

    def hand_out(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """After an update: every parameter from the rank that owns it to the others. Args: those given to `owned`."""

    def collect(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The CPU tensors of all ranks together, on the first; each rank's own on the others."""
        return dict(tensors)

    def leave(self) -> None:
        """Wait for the others, then end together: nobody minds the others' silence from here on."""


ALONE = Ranks()


class Group(Ranks):
    """The processes that `torchrun` started; a context manager that tells the others when it is left by an error."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Meet the others. Raises: TrainError when they do not come."""
        self.share = Share(rank, size)
        self._left = False
        try:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=MEET))
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
            own = dist.PrefixStore("headrace-watch", store.clone())  # type: ignore[attr-defined]
            self._watch = Watch(own, rank, size)
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as exc:
            raise TrainError(
                f"{size} ranks that meet", str(exc), "start all of them, with one torchrun a node"
            ) from exc
        self._watch.start()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number added up over the ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._explained():
            dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, in order."""
        found: list[Any] = [None] * self.share.size
        with self._explained():
            dist.all_gather_object(found, value)
        return found

    def decide(self, value: Value) -> Value:
        """The first rank's value; what the others give is not looked at."""
        held = [value]
        with self._explained():
            dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    def spread(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The first rank's tensors; all ranks end with tensors on the CPU."""
        told = self.decide([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()] if self.first else [])
        found = {}
        for name, shape, dtype in told:
            tensor = tensors[name].detach().cpu().contiguous() if self.first else torch.empty(shape, dtype=dtype)
            with self._explained():
                dist.broadcast(tensor, src=0)
            found[name] = tensor
        return found

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over the ranks; a parameter that has one nowhere keeps none."""
        trained = [p for p in parameters if p.requires_grad]
        counts = self.sum([0.0 if p.grad is None else 1.0 for p in trained])
        for bucket in _buckets([p for p, count in zip(trained, counts, strict=True) if count]):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            with self._explained():
                dist.all_reduce(flat)
            for parameter, own in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = own.view_as(parameter)

    def owned(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that this rank updates, and whose moments it holds."""
        owners = _owners(parameters, self.share.size)
        return [p for p, owner in zip(parameters, owners, strict=True) if owner == self.share.rank]

    @torch.no_grad()
    def hand_out(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """After an update: every parameter from the rank that owns it to the others. Args: those given to `owned`."""
        owners = _owners(parameters, self.share.size)
        for rank in range(self.share.size):
            for bucket in _buckets([p for p, owner in zip(parameters, owners, strict=True) if owner == rank]):
                flat = torch.cat([p.reshape(-1) for p in bucket])
                with self._explained():
                    dist.broadcast(flat, src=rank)
                if rank != self.share.rank:
                    for parameter, new in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                        parameter.copy_(new.view_as(parameter))

    def collect(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The CPU tensors of all ranks together, on the first; each rank's own on the others."""
        found = dict(tensors)
        told = self.gather([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
        for rank, (name, shape, dtype) in [(r, own) for r in range(1, self.share.size) for own in told[r]]:
            with self._explained():
                if self.first:
                    found[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(found[name], src=rank)
                elif self.share.rank == rank:
                    dist.send(tensors[name], dst=0)
        return found

    def leave(self) -> None:
        """Wait for the others, then end together: nobody minds the others' silence from here on."""
        self.sum([0.0])
        self._watch.stop()
        self._left = True

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        if exc is not None and not self._left:
            # No farewell to the group: its other members may wait for a collective that will not come.
            found = str(exc.args[1]) if isinstance(exc, HeadraceError) else str(exc)
            self._watch.fail(f"{type(exc).__name__}: {found.partition(chr(10))[0]}")
            return
        if not self._left:
            self.leave()
        dist.destroy_process_group()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a collective that broke into the cause."""
        try:
            yield
        except RuntimeError as exc:
            cause = self._watch.why(str(exc).partition("\n")[0])
            raise TrainError("every rank to take part in the step", cause, _AGAIN) from exc


def _owners(parameters: Sequence[torch.nn.Parameter], num_ranks: int) -> list[int]:
    """The rank that owns each parameter: the largest first, each to the rank that has least."""
    held, owners = [0] * num_ranks, [0] * len(parameters)
    for place in sorted(range(len(parameters)), key=lambda k: (-parameters[k].numel(), k)):
        owners[place] = min(range(num_ranks), key=lambda rank: (held[rank], rank))
        held[owners[place]] += parameters[place].numel()
    return owners


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters in order, of one dtype and at most BUCKET_BYTES together (or one)."""
    bucket: list[torch.nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if bucket and (filled + own > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += own
    if bucket:
        yield bucket


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run: those that the environment names, or this process alone.

    On a GPU each rank takes the one of its place on its node. Raises: TrainError for an environment that makes no
    sense, or ranks that do not meet.
    """
    rank, size, place = (
        _variable(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if size == 1:
        yield ALONE
        return
    if not 0 <= rank < size:
        raise TrainError(f"RANK below WORLD_SIZE {size}", str(rank), "start the ranks with torchrun")
    if device.type == "cuda":
        torch.cuda.set_device(place)
    with Group(rank, size, device) as group:
        yield group


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise TrainError(f"a number in the environment variable {name}", repr(text), "start the ranks with torchrun")
    return int(text)
