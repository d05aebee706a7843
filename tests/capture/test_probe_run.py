import json
from pathlib import Path
from typing import Any

import pytest

from headrace.capture.probe import PROBE_FILE, failed, raise_failed
from headrace.capture.probe_run import probe_before_capture, probe_run
from headrace.codec.spec import short_spec
from headrace.config import RunFile, RunFolder, TargetConfig
from headrace.errors import CaptureError
from headrace.progress import Silent
from headrace.store.manifest import Manifest
from headrace.target.engine_target import open_engines
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.fake_engine import CHUNK, SERVER_FAULTS, STATE_FAULTS
from headrace.testing.tiny_target import save_tiny_target
from tests.capture.conftest import write_set
from tests.capture.test_engines import engines, with_engine
from tests.engines import EngineProcess

LENGTHS = (40, 36, 44, 38, 5, 41)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its norms have weights that are not all one: with those, a norm that is applied twice changes nothing."""
    return save_tiny_target(tmp_path_factory.mktemp("target") / "spread", "glm4", tied=False)


@pytest.fixture
def long_folder(folder: RunFolder, tmp_path: Path) -> RunFolder:
    """A run folder whose samples are longer than a chunk of the fake engine."""
    longer = RunFolder(tmp_path / "longer")
    write_set(longer.prepared, LENGTHS, trained=True)
    return longer


@pytest.fixture
def long_cfg(cfg: RunFile, long_folder: RunFolder) -> RunFile:
    made = with_engine(cfg, timeout_s=5.0, flags=["--max-num-batched-tokens", str(CHUNK)])
    return made.model_copy(update={"run": str(long_folder.root)})


def load(cfg: RunFile) -> TransformersTarget:
    return load_target(TargetConfig(model=cfg.target.model, dtype=cfg.target.dtype, device="cpu"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_passes_in_every_part(long_cfg: RunFile, long_folder: RunFolder, dtype: str) -> None:
    cfg = long_cfg.model_copy(
        update={"target": long_cfg.target.model_copy(update={"engine": "transformers", "dtype": dtype})}
    )
    findings = probe_run(cfg, long_folder, load(cfg), lambda: load(cfg), Silent())
    assert failed(findings) == []
    assert {finding.part for finding in findings} == {"logprobs", "taps", "requests", "sound", "hashes"}
    ratios = [finding.figures["ratio"] for finding in findings if "ratio" in finding.figures]
    assert len(ratios) == 4 * 3
    assert min(float(ratio) for ratio in ratios) > 3
    kept = json.loads((long_folder.root / PROBE_FILE).read_text())
    assert kept["ok"]
    assert len(kept["findings"]) == len(findings)


@pytest.mark.parametrize(("codec", "dtype"), [("raw", "float32"), ("fp8", "bfloat16"), ("rotated:8", "bfloat16")])
def test_a_sound_engine_passes(long_cfg: RunFile, long_folder: RunFolder, codec: str, dtype: str) -> None:
    target = long_cfg.target.model_copy(update={"dtype": dtype})
    capture = long_cfg.capture.model_copy(update={"codec": codec, "dtype": "bfloat16"})
    cfg = long_cfg.model_copy(update={"target": target, "capture": capture})
    with engines(cfg, "a", "b", codec=short_spec(codec, 2, 32, "bfloat16"), dtype=dtype):
        findings = probe_run(cfg, long_folder, open_engines(cfg, long_folder), lambda: load(cfg), Silent())
    assert failed(findings) == []
    assert [f for f in findings if f.what.endswith("encoded states")], "the codec's own states were looked at"
    assert {finding.what.partition(":")[0] for finding in findings if finding.part != "hashes"} == {"a", "b"}


CAUSES = {
    "out_of_order": "rows out of place: token 0 holds the states of token 16",
    "chunk_lost": "rows of",
    "zero_rows": "all zero at token 1",
    "nan": "not finite at token",
    "duplicate_rows": "differ but have the same states",
    "unsorted_taps": "columns are not in the stated order",
    "prefix_dropped": "rows of",
    "off_by_one": "one block early",
    "normed_final": "the final norm was applied already",
    "other_tokens": "other weights or tokens",
    "wrong_ids": r"ids of \d+ tokens \[1,",
    "slow": "Read timed out",
    "errors_500": "no memory left",
    "hang": "Read timed out",
    "queue_full": "the queue is full",
}


@pytest.mark.parametrize("fault", [name for name in (*STATE_FAULTS, *SERVER_FAULTS) if name != "death"])
def test_each_fault_fails_and_its_cause_is_named(long_cfg: RunFile, long_folder: RunFolder, fault: str) -> None:
    timeout_s = {"slow": 0.3, "hang": 0.3}.get(fault, 5.0)
    cfg = with_engine(long_cfg, timeout_s=timeout_s, flags=long_cfg.engine.flags)
    with engines(cfg, "a", fault=fault):
        findings = probe_run(cfg, long_folder, open_engines(cfg, long_folder), lambda: load(cfg), Silent())
    wrong = failed(findings)
    assert all(finding.cause and finding.fix for finding in wrong)
    with pytest.raises(CaptureError, match=CAUSES[fault]):
        raise_failed(findings, Path("probe.json"))


def test_an_engine_that_dies_is_named(long_cfg: RunFile, long_folder: RunFolder) -> None:
    child = EngineProcess(long_folder.root / "engines" / "a", Path(long_cfg.target.model), dtype="bfloat16")
    try:
        child.wait_until_healthy()
        child.kill()
        child.start(fault="death")
        child.wait_until_healthy()
        findings = probe_run(
            long_cfg, long_folder, open_engines(long_cfg, long_folder), lambda: load(long_cfg), Silent()
        )
    finally:
        child.kill()
    with pytest.raises(CaptureError, match="the connection broke"):
        raise_failed(findings, Path("probe.json"))
    assert "headrace engine --launch" in failed(findings)[0].fix


@pytest.mark.parametrize("fault", ["normed_final", "off_by_one", "prefix_dropped"])
def test_without_a_reference_the_logprobs_and_counts_still_tell(
    long_cfg: RunFile, long_folder: RunFolder, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.probe_run.free_bytes", lambda device: 0)

    def none() -> TransformersTarget:
        raise AssertionError("it does not fit")

    with engines(long_cfg, "a") as (one,):
        assert not failed(probe_run(long_cfg, long_folder, open_engines(long_cfg, long_folder), none, Silent()))
        one.fault = fault
        assert failed(probe_run(long_cfg, long_folder, open_engines(long_cfg, long_folder), none, Silent()))


def test_a_capture_of_many_tokens_is_probed_first_and_its_manifest_says_so(
    long_cfg: RunFile, long_folder: RunFolder
) -> None:
    from headrace.capture.capture import capture

    cfg = long_cfg.model_copy(update={"capture": long_cfg.capture.model_copy(update={"probe_over": 100})})
    with engines(cfg, "a") as (one,):
        opened = open_engines(cfg, long_folder)
        one.fault = "off_by_one"
        with pytest.raises(CaptureError, match="one block early"):
            probe_before_capture(cfg, long_folder, opened, lambda: load(cfg), Silent())
        one.fault = ""
        probe_before_capture(cfg, long_folder, opened, lambda: load(cfg), Silent())
        capture(cfg, long_folder, opened, Silent())
        told: Any = Manifest.read(long_folder.states).provenance["probe"]
        assert told["ok"]
        count = one.num_requests
        probe_before_capture(cfg, long_folder, opened, lambda: load(cfg), Silent())
        assert one.num_requests == count, "what is captured is not probed again"
        one.fault = "nan"
        assert failed(probe_run(cfg, long_folder, opened, lambda: load(cfg), Silent()))
    told = Manifest.read(long_folder.states).provenance["probe"]
    assert not told["ok"]
    assert "not finite" in told["failed"][0]


def test_a_small_capture_is_not_probed(long_cfg: RunFile, long_folder: RunFolder) -> None:
    with engines(long_cfg, "a") as (one,):
        probe_before_capture(
            long_cfg, long_folder, open_engines(long_cfg, long_folder), lambda: load(long_cfg), Silent()
        )
        assert one.num_requests == 0


def test_another_tokenizer_of_the_set_and_other_weights_of_the_store_are_named(
    long_cfg: RunFile, long_folder: RunFolder
) -> None:
    path = long_folder.prepared / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_hash": "other"}))
    cfg = long_cfg.model_copy(update={"target": long_cfg.target.model_copy(update={"engine": "transformers"})})
    target = load(cfg)
    findings = probe_run(cfg, long_folder, target, lambda: target, Silent())
    assert [finding.part for finding in failed(findings)] == ["hashes"]
    assert "another tokenizer_hash: other" in failed(findings)[0].cause


def test_an_engine_that_encodes_otherwise_than_it_says_is_named(long_cfg: RunFile, long_folder: RunFolder) -> None:
    with engines(long_cfg, "a") as (one,):
        one.encoded = one.encoded[::-1]
        findings = probe_run(
            long_cfg, long_folder, open_engines(long_cfg, long_folder), lambda: load(long_cfg), Silent()
        )
    assert {finding.cause for finding in failed(findings)} == {"encoded states are of the stated taps in another order"}
