"""A capture by targets on many machines: a Ray Data pipeline that ends in our one writer.

In: capture groups that a store lacks, and a Ray cluster. Groups are read where the driver runs, and each goes as a
whole to an actor that holds a target, so that its bytes are those of a capture on one such machine. Out: records as the
actors sealed them, in any order, each once: what a retried task gives again is dropped. Only the driver writes.
"""

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from headrace import errors
from headrace.capture.fleet_actor import ASKED, GroupActor, Wrong, told_of
from headrace.codec.basis import FILE_NAME as BASIS_NAME
from headrace.codec.drift import Drift
from headrace.config import CaptureConfig, RunFile
from headrace.errors import CaptureError, HeadraceError
from headrace.order import CaptureGroup
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress, Silent
from headrace.record import Record, Segment, make_record, sealed_message, segment_from_message
from headrace.store.manifest import TARGET_IDENTITY
from headrace.taps import Tap
from headrace.target.base import Generated, TargetSpec

if TYPE_CHECKING:
    from headrace.capture.capture import GroupEncoder

_MOST_BLOCKS = 2048  # pieces that groups are dealt out in; a piece is what a lost actor's task does again
_A_TIME = 8  # groups that a server is given together
_WATCH_S = 5.0
_RETRIES = 8  # of a piece; a target that always dies ends the capture
_NO_RAY = "pip install 'headrace[ray]'"


@dataclass(frozen=True, eq=False)
class Made:
    """What came back at a time: whole records, reasons of rows that failed, and the tokens that were run."""

    records: list[Record]
    wrong: Wrong
    num_tokens: int


@dataclass
class Fleet:
    """Targets on a cluster, as one; each actor loads its own, which must be this one."""

    spec: TargetSpec
    provenance: Mapping[str, Any]
    cfg: RunFile
    num_targets: int
    progress: Progress = field(default_factory=Silent)
    _parts: dict[int, dict[int, Segment]] = field(default_factory=dict)

    def states(
        self, ids: Sequence[npt.NDArray[np.int32]], taps: Sequence[Tap], padded_tokens: int
    ) -> list[torch.Tensor]:
        """Raises: CaptureError: states do not leave the actors; records do, by `run`."""
        raise CaptureError("states of a target in this process", "a Ray cluster", "leave --ray out")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        *,
        batch_size: int = 64,
        told: Callable[[int, int], None] | None = None,
    ) -> list[Generated]:
        """Raises: CaptureError: a fleet captures; it does not answer."""
        raise CaptureError("answers of a target in this process", "a Ray cluster", "leave --ray out")

    def run(
        self,
        work: Sequence[tuple[CaptureGroup, list[int]]],
        prepared: PreparedSet,
        encoder: "GroupEncoder",
        generation: int,
        states: Path,
    ) -> Iterator[Made]:
        """What becomes of the wanted rows of each group, each row once.

        Args: states: the folder with the codec's basis, if it has one.
        Raises: CaptureError for an error of an actor, for rows that nobody gave, and when the cluster gives up.
        """
        import ray

        wanted = {row for _, rows in work for row in rows}
        self._parts = {}
        try:
            told = self.told(encoder, generation, states)
            with self.watched():
                for table in self._pipeline(work, prepared, told):
                    yield self.received(table, wanted, prepared, encoder.drift)
        except ray.exceptions.RayError as exc:
            hint = "see the cluster's logs; the same command goes on from what is stored"
            raise CaptureError("a Ray cluster that captures", f"{type(exc).__name__}: {exc}", hint) from exc
        if wanted:
            hint = "run the command again; it goes on from what is stored"
            raise CaptureError("every row that was asked for", f"none of {len(wanted)} of them", hint)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Say when no node is left that a target fits on: Ray itself waits for one without a word."""
        ended = threading.Event()

        def watch() -> None:
            gone = False
            while not ended.wait(_WATCH_S):
                before, gone = gone, not num_fitting(self.cfg.capture, live_nodes())
                if gone and not before:
                    self.progress.note(
                        "ray: no node left that a target fits on; waiting for one (stopping loses nothing)"
                    )

        watcher = threading.Thread(target=watch, name="headrace-ray", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def told(self, encoder: "GroupEncoder", generation: int, states: Path) -> dict[str, Any]:
        """What an actor is made from."""
        spec = encoder.codec.spec
        return {
            "run_file": self.cfg.model_dump_json(),
            "expected": {name: getattr(self.spec, name) for name in TARGET_IDENTITY},
            "taps": [str(tap) for tap in encoder.taps],
            "codec": spec.to_json(),
            "basis": (states / BASIS_NAME).read_bytes() if "basis" in spec.parameters else None,
            "rule": str(encoder.rule),
            "generation": generation,
        }

    def _pipeline(
        self, work: Sequence[tuple[CaptureGroup, list[int]]], prepared: PreparedSet, told: Mapping[str, Any]
    ) -> Iterator[pa.Table]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not work:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        items = [{"rows": list(group.rows), "padded": group.padded_tokens, "wanted": rows} for group, rows in work]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        folder = str(prepared.folder.resolve())
        groups = ray.data.from_items(items, override_num_blocks=min(len(items), _MOST_BLOCKS))
        samples = groups.map_batches(
            read_groups, fn_kwargs={"folder": folder}, batch_size=1, batch_format="pyarrow", num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=1), scheduling_strategy=here,
        )  # fmt: skip
        a_time = _A_TIME if self.cfg.target.engine == "vllm" else 1
        pool = ray.data.ActorPoolStrategy(min_size=1, max_size=self.num_targets, initial_size=self.num_targets)
        records = samples.map_batches(
            GroupActor, fn_constructor_kwargs=dict(told), batch_size=a_time, batch_format="pyarrow", compute=pool,
            max_restarts=-1, max_task_retries=_RETRIES, **placement(self.cfg.capture),
        )  # fmt: skip
        yield from records.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

    def received(self, table: pa.Table, wanted: set[int], prepared: PreparedSet, drift: Drift | None) -> Made:
        """Whole records and reasons of rows still wanted; anything else was given before."""
        made = Made([], {}, sum(tokens or 0 for tokens in table.column("num_tokens").to_pylist()))
        messages = table.column("message")
        rest = table.drop_columns(["message"]).to_pylist()
        for n, told in enumerate(rest):
            row = told["row"]
            if told["error"] is not None:
                raise _error(told["error"])
            if row not in wanted:
                continue
            if told["reason"] is not None:
                made.wrong[row] = (told["reason"], bool(told["permanent"]))
                wanted.discard(row)
                continue
            segment = segment_from_message(memoryview(messages[n].as_buffer()), told["digest"])
            if segment.id != prepared.sample_id(row):
                hint = "two captures of different sets must not share one cluster job; run the command again"
                raise CaptureError(f"row {row} with id {prepared.sample_id(row).hex()}", segment.id.hex(), hint)
            parts = self._parts.setdefault(row, {})
            parts[segment.segment] = segment
            if len(parts) == segment.num_segments:
                made.records.append(Record(tuple(parts[k] for k in sorted(parts))))
                wanted.discard(row)
                del self._parts[row]
                if drift is not None and told["lost"] is not None:
                    drift.count(row, prepared.sample(row).source, told["lost"])
        return made


def read_groups(items: pa.Table, folder: str) -> pa.Table:
    """On the driver's node, where the prepared set is: groups with their samples, each a record without states."""
    prepared, found = PreparedSet.open(Path(folder)), []
    for item in items.to_pylist():
        sealed = []
        for row in item["rows"]:
            sample = prepared.sample(row)
            empty = make_record(sample, [(0, sample.num_tokens)], [b""], 0)
            sealed.append(sealed_message(empty.segments[0]))
        messages, digests = [bytes(message) for message, _ in sealed], [digest for _, digest in sealed]
        found.append({"wanted": item["wanted"], "padded": item["padded"], "samples": messages, "digests": digests})
    return pa.Table.from_pylist(found, ASKED)


def placement(cfg: CaptureConfig) -> dict[str, Any]:
    """What Ray is asked for, for one target."""
    own = dict(cfg.ray_resources)
    named = {"num_cpus": own.pop("CPU", None), "num_gpus": own.pop("GPU", None), "memory": own.pop("memory", None)}
    asked: dict[str, Any] = {name: amount for name, amount in named.items() if amount is not None}
    if not asked and not own and cfg.ray_accelerator is None:
        asked["num_cpus"] = 1.0
    asked.setdefault("num_cpus", 0.0)  # Ray's own default for a task would be one
    if own:
        asked["resources"] = own
    if cfg.ray_accelerator is not None:
        asked["accelerator_type"] = cfg.ray_accelerator
    return asked


def num_fitting(cfg: CaptureConfig, nodes: Collection[Mapping[str, float]]) -> int:
    """How many targets nodes with these resources hold at once."""
    asked = placement(cfg)
    needed = {"CPU": asked["num_cpus"], "GPU": asked.get("num_gpus", 0.0), "memory": asked.get("memory", 0.0)}
    needed |= asked.get("resources", {})
    if cfg.ray_accelerator is not None:
        needed[f"accelerator_type:{cfg.ray_accelerator}"] = 0.001  # as Ray itself asks
    needed = {name: amount for name, amount in needed.items() if amount > 0}
    most = [min(node.get(name, 0.0) / amount for name, amount in needed.items()) for node in nodes] if needed else []
    return sum(int(one + 1e-9) for one in most)


def live_nodes() -> list[dict[str, float]]:
    """Resources of each node of the cluster that is there."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def open_fleet(cfg: RunFile, progress: Progress) -> Iterator[Fleet]:
    """Join the cluster at RAY_ADDRESS, or the one this machine is part of, until the end of the block.

    Raises: CaptureError without Ray, a cluster, or a node with the resources; what loading a target raises, or starting
    an engine, where a worker meets it.
    """
    try:
        import ray
    except ImportError as exc:
        raise CaptureError("Ray, for --ray", "it is not installed", _NO_RAY) from exc
    joined = not ray.is_initialized()
    if joined:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError) as exc:
            hint = "start one (ray start --head), or say where it is in RAY_ADDRESS"
            raise CaptureError("a Ray cluster", str(exc), hint) from exc
    try:
        yield _fleet(cfg, progress)
    finally:
        if joined:
            ray.shutdown()


def _fleet(cfg: RunFile, progress: Progress) -> Fleet:
    import ray

    nodes = live_nodes()
    num = min(cfg.capture.ray_targets, num_fitting(cfg.capture, nodes))
    asked = placement(cfg.capture)
    if not num:
        shown = "; ".join(json.dumps({k: v for k, v in own.items() if not k.startswith("node:")}) for own in nodes)
        hint = "add such a node, or change capture.ray_resources and capture.ray_accelerator"
        raise CaptureError(f"a node with {asked}", f"{len(nodes)} nodes: {shown}", hint)
    if num < cfg.capture.ray_targets:
        progress.note(f"ray: room for {num} targets of the {cfg.capture.ray_targets} that capture.ray_targets asks for")
    try:
        text = ray.get(ray.remote(told_of).options(**asked).remote(cfg.model_dump_json()))
    except ray.exceptions.RayError as exc:
        raise CaptureError("a worker that reads the target", f"{exc}", "see the cluster's logs") from exc
    told = json.loads(text)
    if isinstance(told, list):
        raise _error(text)
    progress.note(f"ray: {num} targets on {len(nodes)} nodes")
    return Fleet(TargetSpec(**told.pop("spec")), told, cfg, num, progress)


def _error(text: str) -> HeadraceError:
    """An error of the family that a worker met."""
    name, *args = json.loads(text)
    kind = getattr(errors, name, CaptureError)
    found: HeadraceError = kind(*args) if len(args) == 3 else CaptureError(f"no {name} in a worker", text, "see there")
    return found
