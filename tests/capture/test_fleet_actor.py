"""What a worker of a cluster makes of groups, above all with a vLLM that it starts. No cluster is needed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from headrace.capture.capture import GroupEncoder, capture_taps
from headrace.capture.fleet import Fleet, read_groups
from headrace.capture.fleet_actor import GroupActor, told_of
from headrace.codec.registry import open_codec
from headrace.codec.spec import short_spec
from headrace.config import RunFile, RunFolder
from headrace.order import CaptureGroup, capture_groups
from headrace.prepare.prepared import PreparedSet
from headrace.record import Record
from headrace.target.base import TargetSpec
from headrace.target.transformers_target import TransformersTarget
from headrace.token_rule import ALL_TOKENS, TokenRule
from tests.engines import stand_in

# Stands for the python of vLLM's environment: `vllm serve` is the fake engine, as engine.json says what to serve.
PYTHON = """#!{python}
import json, sys, threading
from pathlib import Path
if sys.argv[1] == "-c":
    print(json.dumps({{"vllm": "0.32.0+cpu", "headrace": "0.1.0", "prefix": "/nowhere"}}))
    sys.exit()
import torch
from headrace.target.engine_file import EngineFile
from headrace.testing.fake_engine import FOREVER, FakeEngine
given = dict(zip(sys.argv, sys.argv[1:]))
path = Path(json.loads(given["--kv_transfer_config"])["kv_connector_extra_config"]["engine"])
file, torch_threads = EngineFile.read(path), torch.set_num_threads(1)
mark, fault = Path(given["--mark"]), given["--fault"]
mark.write_text(mark.read_text() + "started ") if mark.exists() else mark.write_text("started ")
if fault == "dies-once":
    fault = "death" if mark.read_text() == "started " else ""
basis = None if file.basis is None else Path(file.basis)
FakeEngine(
    path.parent, file.model_folder, [file.taps[k] for k in file.encoded], file.spec, basis=basis, dtype=file.dtype,
    fault=fault, port=int(given["--port"]), engine="vllm", version="0.32.0+cpu",
)
threading.Event().wait()
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(tmp_path_factory.mktemp("python"), PYTHON)


@pytest.fixture
def vllm_cfg(cfg: RunFile, python: Path, tmp_path: Path) -> RunFile:
    return with_fault(cfg, python, tmp_path / "mark", "")


def with_fault(cfg: RunFile, python: Path, mark: Path, fault: str) -> RunFile:
    flags = ["--mark", str(mark), "--fault", fault]
    engine = {"python": str(python), "flags": flags, "in_flight": 3, "timeout_s": 10.0, "retries": 1}
    target = cfg.target.model_copy(update={"engine": "vllm"})
    return cfg.model_copy(update={"target": target, "engine": cfg.engine.model_copy(update=engine)})


def fleet_of(cfg: RunFile) -> Fleet:
    told = json.loads(told_of(cfg.model_dump_json()))
    return Fleet(TargetSpec(**told["spec"]), {}, cfg, 1)


def asked_of(folder: RunFolder, *groups: CaptureGroup) -> pa.Table:
    items = [{"rows": list(one.rows), "padded": one.padded_tokens, "wanted": list(one.rows)} for one in groups]
    return read_groups(pa.Table.from_pylist(items), str(folder.prepared))


def encoder_of(cfg: RunFile, target: Any, codec: str = "raw", rule: TokenRule = ALL_TOKENS) -> GroupEncoder:
    return GroupEncoder(target, capture_taps(cfg, 5), open_codec(short_spec(codec, 2, 32, "bfloat16")), rule)


def made_by(fleet: Fleet, encoder: GroupEncoder, folder: RunFolder, *groups: CaptureGroup) -> tuple[list[Record], Any]:
    prepared = PreparedSet.open(folder.prepared)
    table = GroupActor(**fleet.told(encoder, 4, folder.states))(asked_of(folder, *groups))
    wanted = {row for group in groups for row in group.rows}
    made = fleet.received(table, wanted, prepared, None)
    assert wanted == set()
    assert made.num_tokens == sum(prepared.sample(row).num_tokens for group in groups for row in group.rows)
    return made.records, made.wrong


def groups_of(folder: RunFolder) -> list[CaptureGroup]:
    return capture_groups(PreparedSet.open(folder.prepared).lengths, 5, 40)


@pytest.mark.parametrize("codec", ["raw", "rotated:8"])
def test_a_vllm_of_its_own_encodes_the_records(
    vllm_cfg: RunFile, folder: RunFolder, target: TransformersTarget, codec: str
) -> None:
    vllm_cfg = vllm_cfg.model_copy(update={"capture": vllm_cfg.capture.model_copy(update={"codec": codec})})
    fleet = fleet_of(vllm_cfg)
    assert (fleet.spec.engine, fleet.spec.engine_version) == ("vllm", "0.32.0+cpu")
    encoder = encoder_of(vllm_cfg, fleet, codec)
    records, wrong = made_by(fleet, encoder, folder, *groups_of(folder)[:3])
    assert wrong == {}
    prepared = PreparedSet.open(folder.prepared)
    for record in records:
        (segment,) = record.segments
        ids = prepared.sample(record.row).input_ids
        (alone,) = target.states([ids], encoder.taps, len(ids))
        assert np.array_equal(segment.input_ids, ids)
        assert record.generation == 4
        assert bytes(segment.payload) == encoder.codec.encode(alone.to(torch.bfloat16))


def test_what_a_server_cannot_leave_out_is_left_out_here(
    vllm_cfg: RunFile, folder: RunFolder, target: TransformersTarget
) -> None:
    rule = TokenRule("context")
    own = vllm_cfg.capture.model_copy(update={"tokens": "needed"})
    fleet = fleet_of(vllm_cfg.model_copy(update={"capture": own}))
    group = groups_of(folder)[0]
    records, _ = made_by(fleet, encoder_of(vllm_cfg, fleet, rule=rule), folder, group)
    prepared = PreparedSet.open(folder.prepared)
    for record in records:
        start, end = rule.span(prepared.sample(record.row).loss_mask)
        assert (record.segments[0].token_start, record.num_tokens) == (start, end - start)


def test_a_server_that_died_is_started_again_and_nothing_is_made_twice(
    cfg: RunFile, folder: RunFolder, python: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "starts"
    fleet = fleet_of(with_fault(cfg, python, mark, "dies-once"))
    groups = groups_of(folder)
    records, wrong = made_by(fleet, encoder_of(fleet.cfg, fleet), folder, *groups)
    assert wrong == {}
    assert sorted(record.row for record in records) == sorted(row for group in groups for row in group.rows)
    assert mark.read_text() == "started " * 2


def test_a_server_that_always_dies_is_told_by_its_last_lines(
    cfg: RunFile, folder: RunFolder, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.fleet_actor.RESTARTS", 1)
    fleet = fleet_of(with_fault(cfg, python, tmp_path / "starts", "death"))
    table = GroupActor(**fleet.told(encoder_of(fleet.cfg, fleet), 4, folder.states))(
        asked_of(folder, *groups_of(folder))
    )
    (row,) = table.to_pylist()
    assert row["row"] == -1
    assert json.loads(row["error"])[0] == "TargetError"
    assert (tmp_path / "starts").read_text() == "started " * 2


def test_a_server_whose_states_are_not_sound_stops_the_capture(
    cfg: RunFile, folder: RunFolder, python: Path, tmp_path: Path
) -> None:
    fleet = fleet_of(with_fault(cfg, python, tmp_path / "mark", "nan"))
    group = groups_of(folder)[0]
    table = GroupActor(**fleet.told(encoder_of(fleet.cfg, fleet), 4, folder.states))(asked_of(folder, group))
    (row,) = [one for one in table.to_pylist() if one["error"] is not None]
    assert "not finite at token" in row["error"], "the first sample of a window is proved, and stops it"


def test_a_target_that_cannot_be_told_of_is_an_error_as_data(cfg: RunFile, tmp_path: Path) -> None:
    bad = cfg.model_copy(update={"target": cfg.target.model_copy(update={"model": str(tmp_path / "none")})})
    assert json.loads(told_of(bad.model_dump_json()))[0] == "TargetError"
    engine = cfg.engine.model_copy(update={"python": str(tmp_path / "python")})
    lacking = with_fault(cfg, tmp_path / "python", tmp_path / "mark", "").model_copy(update={"engine": engine})
    assert "engine.python" in told_of(lacking.model_dump_json())
