"""Capture by targets on a Ray cluster: the store of a local capture, to the bit, whatever dies."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from headrace.capture.capture import GroupEncoder, capture, capture_taps
from headrace.capture.fleet import Fleet, num_fitting, open_fleet, placement, read_groups
from headrace.capture.fleet_actor import MADE, GroupActor
from headrace.cli.main import app
from headrace.codec.registry import open_codec
from headrace.codec.spec import short_spec
from headrace.config import CaptureConfig, RunFile, RunFolder
from headrace.errors import CaptureError, StoreError, TargetError
from headrace.order import capture_groups
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.record import make_record, sealed_message
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.target.transformers_target import TransformersTarget
from headrace.token_rule import ALL_TOKENS
from tests.capture.conftest import make_cfg, write_set

MANY = [3 + 5 * n % 17 for n in range(300)]
STORE_BYTES = 80 * 2**20  # the least that Ray gives to a node's objects


def with_ray(cfg: RunFile, **settings: Any) -> RunFile:
    return cfg.model_copy(update={"capture": cfg.capture.model_copy(update=settings)})


class Cluster:
    """A head without targets, and nodes with one each."""

    def __init__(self) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra `ray` is not installed")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quick = {
            "worker_niceness": 0,
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_failure_threshold": 8,
        }
        size = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        head = {"num_cpus": 1, "_system_config": quick, **size}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._add(), self._add()]
        import ray

        ray.init(address=self._cluster.address, log_to_driver=False, include_dashboard=False)

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, resources={"target": 1}, object_store_memory=STORE_BYTES)

    def kill(self, node: Any) -> None:
        """The raylet with SIGKILL; its workers die with it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    yield one
    one.close()


@pytest.fixture
def many(cfg: RunFile, tmp_path: Path) -> RunFolder:
    folder = RunFolder(Path(cfg.run))
    write_set(folder.prepared, MANY, trained=True)
    return folder


def stored(folder: RunFolder) -> dict[int, tuple[int, bytes]]:
    """Tokens and payload of every row."""
    prepared, reader = PreparedSet.open(folder.prepared), StoreReader(folder.states)
    records = (reader.read(row, prepared.sample_id(row)) for row in reader.rows.tolist())
    return {own.row: (own.num_tokens, b"".join(bytes(one.payload) for one in own.segments)) for own in records}


def local(cfg: RunFile, root: Path, target: TransformersTarget, **settings: Any) -> dict[int, tuple[int, bytes]]:
    """What a capture here stores."""
    other = RunFolder(root)
    write_set(other.prepared, MANY, trained=True)
    capture(with_ray(make_cfg(Path(cfg.target.model), root), **settings), other, target, Silent())
    return stored(other)


class Watched(Silent):
    """Kills a node once so much is done; slow, so that it is in the middle."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.notes: list[str] = []
        self.figures: list[tuple[int, dict[str, Any]]] = []
        self._cluster = cluster

    def note(self, message: str) -> None:
        self.notes.append(message)

    def advance(self, done: int, **figures: float | int | str) -> None:
        self.figures.append((done, figures))
        if self._cluster is not None and done:
            self._cluster.kill(self._cluster.nodes.pop())
            self._cluster = None


def on_cluster(test: Any) -> Any:
    """Ray's own warnings are no errors; a busy machine takes its time to start nodes and workers."""
    for mark in (pytest.mark.ray, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)):
        test = mark(test)
    return test


@on_cluster
def test_the_store_is_that_of_a_local_capture_to_the_bit_with_a_node_killed_in_the_middle(
    cluster: Cluster, cfg: RunFile, many: RunFolder, target: TransformersTarget, tmp_path: Path
) -> None:
    cfg = with_ray(cfg, ray_resources={"target": 1.0}, ray_targets=2)
    told = Watched(cluster)
    with open_fleet(cfg, told) as fleet:
        assert fleet.spec == target.spec
        summary = capture(cfg, many, fleet, told)
        assert capture(cfg, many, fleet, told) == summary, "done, and kept"
    assert "ray: 2 targets on 3 nodes" in told.notes
    assert len(cluster.nodes) == 1
    assert told.figures[0][0] < sum(MANY) / 4, "in the middle"
    assert (summary["num_records"], summary["num_failed"]) == (len(MANY), 0)
    assert told.figures[-1] == (sum(MANY), told.figures[-1][1])
    assert told.figures[-1][1]["targets"] == 2
    assert verify(many.states) == []
    assert stored(many) == local(cfg, tmp_path / "local", target)
    assert set(StoreReader(many.states).generations.tolist()) == {1}


@on_cluster
def test_another_codec_and_rule_and_a_resumed_store(
    cluster: Cluster, cfg: RunFile, many: RunFolder, target: TransformersTarget, tmp_path: Path
) -> None:
    settings = {"codec": "rotated:8", "tokens": "needed"}
    cfg = with_ray(cfg, ray_resources={"target": 1.0}, **settings)

    class Stopping(Silent):
        def advance(self, done: int, **figures: float | int | str) -> None:
            if done:
                raise KeyboardInterrupt

    with open_fleet(cfg, Silent()) as fleet:
        with pytest.raises(KeyboardInterrupt):
            capture(cfg, many, fleet, Stopping())
        kept = len(StoreReader(many.states).rows)
        assert 0 < kept < len(MANY)
        assert capture(cfg, many, fleet, Silent())["num_records"] == len(MANY)
    assert stored(many) == local(cfg, tmp_path / "local", target, **settings)
    path = tmp_path / "run.yaml"
    path.write_text(cfg.model_dump_json())
    called = CliRunner().invoke(app, ["capture", str(path), "--ray", "--json"])
    assert called.exit_code == 0, called.stderr
    assert json.loads(called.stdout.splitlines()[-1])["num_records"] == len(MANY)
    assert "probe: none by itself with --ray" in called.stderr
    assert "captured before, kept" in called.stderr


@on_cluster
def test_errors_of_workers_are_told_by_the_driver(cluster: Cluster, cfg: RunFile, many: RunFolder) -> None:
    lacking = r"a node with .*'unicorn': 1(?s:.*)\"target\": 1(?s:.*)ray_resources"
    nowhere = with_ray(cfg, ray_resources={"unicorn": 1.0})
    with pytest.raises(CaptureError, match=lacking), open_fleet(nowhere, Silent()):
        pass
    cfg = with_ray(cfg, ray_resources={"target": 1.0})
    gone = cfg.model_copy(update={"target": cfg.target.model_copy(update={"model": "/no/such/model"})})
    with pytest.raises(TargetError, match="a model folder"), open_fleet(gone, Silent()):
        pass
    with open_fleet(cfg, Silent()) as fleet:
        other = replace(fleet, spec=replace(fleet.spec, weights_hash="another"))
        with pytest.raises(CaptureError, match="weights_hash another on every node"):
            capture(cfg, many, other, Silent())


# What follows needs no cluster.


class Told:
    """A table of what came back, as an actor gives it."""

    def __init__(self, prepared: PreparedSet) -> None:
        self._prepared = prepared

    def record(self, row: int, num_segments: int = 1, only: int | None = None) -> list[dict[str, Any]]:
        sample = self._prepared.sample(row)
        size = -(-sample.num_tokens // num_segments)
        spans = [(a, min(a + size, sample.num_tokens)) for a in range(0, sample.num_tokens, size)]
        record = make_record(sample, spans, [b"x" * (b - a) for a, b in spans], 1)
        chosen = [one for one in record.segments if only is None or one.segment == only]
        sealed = [sealed_message(one) for one in chosen]
        return [{"row": row, "message": bytes(message), "digest": digest} for message, digest in sealed]


@pytest.fixture
def fleet(cfg: RunFile, target: TransformersTarget) -> Fleet:
    return Fleet(target.spec, {}, cfg, 1)


def received(fleet: Fleet, rows: list[dict[str, Any]], wanted: set[int], prepared: PreparedSet) -> Any:
    return fleet.received(pa.Table.from_pylist(rows, MADE), wanted, prepared, None)


def test_what_comes_twice_or_was_not_asked_for_is_dropped(fleet: Fleet, many: RunFolder) -> None:
    prepared = PreparedSet.open(many.prepared)
    told, wanted = Told(prepared), {0, 1, 2}
    end = {"row": -1, "num_tokens": 9}
    made = received(fleet, [*told.record(0), *told.record(0), *told.record(7), end], wanted, prepared)
    assert [record.row for record in made.records] == [0]
    assert made.num_tokens == 9
    made = received(
        fleet, [*told.record(0), {"row": 1, "reason": "not finite", "permanent": True}, end], wanted, prepared
    )
    assert made.records == []
    assert made.wrong == {1: ("not finite", True)}
    assert wanted == {2}
    made = received(fleet, told.record(2, 3, only=2), wanted, prepared)
    assert made.records == []
    made = received(fleet, [*told.record(2, 3, only=2), *told.record(2, 3, only=0)], wanted, prepared)
    assert made.records == []
    (whole,) = received(fleet, told.record(2, 3, only=1), wanted, prepared).records
    assert [segment.segment for segment in whole.segments] == [0, 1, 2]
    assert np.array_equal(whole.input_ids, prepared.sample(2).input_ids)
    assert wanted == set()


def test_damaged_bytes_and_errors_of_an_actor_end_the_capture(fleet: Fleet, many: RunFolder) -> None:
    prepared = PreparedSet.open(many.prepared)
    (row,) = Told(prepared).record(0)
    with pytest.raises(StoreError, match="digest"):
        received(fleet, [row | {"message": row["message"][:-1] + b"!"}], {0}, prepared)
    error = {"row": -1, "error": json.dumps(["TargetError", "a model", "none", "look"])}
    with pytest.raises(TargetError, match="expected a model, found none"):
        received(fleet, [error], {0}, prepared)
    with pytest.raises(CaptureError, match="id "):
        received(fleet, Told(prepared).record(3) and [Told(prepared).record(3)[0] | {"row": 4}], {4}, prepared)


def test_groups_go_through_an_actor_as_whole_groups(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, fleet: Fleet
) -> None:
    prepared = PreparedSet.open(folder.prepared)
    encoder = GroupEncoder(target, capture_taps(cfg, 5), open_codec(short_spec("raw", 2, 32, "bfloat16")), ALL_TOKENS)
    group = capture_groups(prepared.lengths, 5, 40)[0]
    items = [{"rows": list(group.rows), "padded": group.padded_tokens, "wanted": [group.rows[0]]}]
    asked = read_groups(pa.Table.from_pylist(items), str(folder.prepared))
    made = GroupActor(**fleet.told(encoder, 4, folder.states))(asked)
    wanted = {group.rows[0]}
    found = fleet.received(made, wanted, prepared, None)
    samples = [prepared.sample(row) for row in group.rows]
    (expected,), _ = encoder.records(samples, group.padded_tokens, group.rows[:1], 4)
    assert [record.generation for record in found.records] == [4]
    assert bytes(found.records[0].segments[0].payload) == bytes(expected.segments[0].payload)
    assert found.num_tokens == sum(sample.num_tokens for sample in samples)
    assert wanted == set()


@pytest.mark.parametrize(
    ("settings", "asked", "nodes", "num"),
    [
        ({}, {"num_cpus": 1.0}, [{"CPU": 4.0}, {"CPU": 0.5}], 4),
        ({"ray_resources": {"GPU": 1.0}}, {"num_cpus": 0.0, "num_gpus": 1.0}, [{"CPU": 4.0}, {"GPU": 2.0}], 2),
        ({"ray_resources": {"CPU": 2.0, "box": 1.0}}, {"num_cpus": 2.0, "resources": {"box": 1.0}},
         [{"CPU": 9.0, "box": 1.0}, {"CPU": 1.0, "box": 5.0}, {"CPU": 8.0}], 1),
        ({"ray_resources": {"GPU": 0.5}, "ray_accelerator": "H100"},
         {"num_cpus": 0.0, "num_gpus": 0.5, "accelerator_type": "H100"},
         [{"GPU": 1.0, "accelerator_type:H100": 1.0}, {"GPU": 8.0, "accelerator_type:A100": 1.0}], 2),
        ({"ray_resources": {"memory": 1e9}}, {"num_cpus": 0.0, "memory": 1e9}, [{"memory": 5e8}], 0),
    ],
)  # fmt: skip
def test_targets_are_placed_by_what_the_run_file_asks_for(
    settings: dict[str, Any], asked: dict[str, Any], nodes: list[dict[str, float]], num: int
) -> None:
    cfg = CaptureConfig(**settings)
    assert placement(cfg) == asked
    assert num_fitting(cfg, nodes) == num


def test_without_ray_it_is_said_what_to_do(cfg: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CaptureError, match=r"not installed(?s:.*)headrace\[ray\]"), open_fleet(cfg, Silent()):
        pass


def test_it_is_said_once_when_no_node_is_left(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"CPU": 1.0}]
    monkeypatch.setattr("headrace.capture.fleet._WATCH_S", 0.01)
    monkeypatch.setattr("headrace.capture.fleet.live_nodes", lambda: list(nodes))
    told = Watched()
    with replace(fleet, progress=told).watched():
        time.sleep(0.1)
        assert told.notes == []
        nodes.clear()
        time.sleep(0.3)
    assert ["no node left that a target fits on" in note for note in told.notes] == [True]


def test_a_fleet_captures_and_does_nothing_else(fleet: Fleet) -> None:
    for asked in (lambda: fleet.states([], [], 1), lambda: fleet.generate([], 1, 0.0, 1.0, 0)):
        with pytest.raises(CaptureError, match="leave --ray out"):
            asked()
