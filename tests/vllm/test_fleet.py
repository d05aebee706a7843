"""Capture on a Ray cluster whose actors each start a real vLLM server: every row once, though a node is killed."""

import contextlib
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml

from headrace.capture.capture import capture
from headrace.capture.fleet import open_fleet
from headrace.codec.registry import open_codec
from headrace.config import RunFolder, TargetConfig, load_run_file
from headrace.prepare.prepared import PreparedSet
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.taps import parse_tap
from headrace.target.transformers_target import load_target
from tests.capture.test_fleet import Cluster, Watched
from tests.vllm.servers import TAPS, run_file
from tests.vllm.test_run import headrace

pytestmark = [
    pytest.mark.vllm, pytest.mark.ray, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800),
]  # fmt: skip

NUM_PROMPTS = 200
FLOAT32 = 1e-4  # relative Frobenius error


def servers() -> list[psutil.Process]:
    """vLLM servers and workers that run now."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = one.cmdline()
            if {"serve", "--kv_transfer_config"} <= set(words) or (words[:1] and words[0].startswith("VLLM::")):
                found.append(one)
    return found


def test_each_actor_starts_a_server_and_a_killed_node_loses_nothing(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    run = yaml.safe_load(path.read_text())
    run |= {"prepare": {"num_demo_prompts": NUM_PROMPTS}}
    run["capture"] = {
        "codec": "raw", "dtype": "float32", "group_tokens": 64, "ray_targets": 2, "ray_resources": {"target": 1.0},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(run))
    done = headrace("prepare", str(path))
    assert done.returncode == 0, done.stderr
    cfg = load_run_file(path, ()).run
    folder = RunFolder(Path(cfg.run))
    prepared = PreparedSet.open(folder.prompts)
    folder.prompts.rename(folder.prepared)
    cluster = Cluster()
    try:
        told = Watched(cluster)
        with open_fleet(cfg, told) as fleet:
            assert fleet.spec.engine == "vllm"
            summary = capture(cfg, folder, fleet, told)
        assert len(cluster.nodes) == 1, "one was killed"
    finally:
        cluster.close()
    assert (summary["num_records"], summary["num_failed"]) == (NUM_PROMPTS, 0)
    assert told.figures[0][0] < int(prepared.lengths.sum()) / 2, "in the middle"
    assert verify(folder.states) == []
    reader = StoreReader(folder.states)
    codec = open_codec(reader.manifest.codec, None)
    target, taps = load_target(TargetConfig(model="demo", dtype="float32", device="cpu")), [parse_tap(t) for t in TAPS]
    for row in range(0, NUM_PROMPTS, 7):
        sample = PreparedSet.open(folder.prepared).sample(row)
        record = reader.read(row, sample.id)
        assert np.array_equal(record.input_ids, sample.input_ids)
        found = torch.cat([codec.reconstruct(codec.features(s.payload, s.num_tokens)) for s in record.segments])
        (expected,) = target.states([sample.input_ids], taps, sample.num_tokens)
        assert (found - expected).norm() / expected.norm() < FLOAT32
    reader.close()
    for _ in range(60):
        if not servers():
            return
        time.sleep(1)
    raise AssertionError("servers have outlived their actors")
