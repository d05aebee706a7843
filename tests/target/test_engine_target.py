from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.codec.spec import short_spec
from headrace.config import RunFile, RunFolder
from headrace.errors import TargetError
from headrace.taps import parse_tap
from headrace.target.channel import Delivery, DeliveryRefused
from headrace.target.endpoints import TooLong
from headrace.target.engine_file import EngineFile
from headrace.target.engine_target import EngineTarget, delivered_states, open_engines
from headrace.testing.fake_engine import FakeEngine
from tests.engines import RAW, TAPS, fake_endpoint, ids
from tests.target.conftest import LoadTiny


def run_file(model: Path, root: Path) -> RunFile:
    target = {"model": str(model), "dtype": "float32", "engine": "vllm", "taps": list(TAPS)}
    return RunFile.model_validate({"run": str(root), "target": target, "engine": {"in_flight": 2, "timeout_s": 10}})


def opened(model: Path, root: Path) -> EngineTarget:
    return open_engines(run_file(model, root), RunFolder(root))


def test_raw_states_of_any_taps_are_the_targets_own(
    folders: dict[str, Path], load_tiny: LoadTiny, tmp_path: Path
) -> None:
    target = load_tiny()
    samples = [np.array(ids(n), dtype=np.int32) for n in (5, 12, 3)]
    taps = [parse_tap("final:pre_norm"), parse_tap("after_block:0")]
    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"]):
        engines = opened(folders["llama"], tmp_path)
        assert engines.spec.__dict__ == {**target.spec.__dict__, "engine": "fake", "engine_version": "0"}
        for own, sample in zip(engines.states(samples, taps, 12), samples, strict=True):
            assert torch.equal(own, target.states([sample], taps, len(sample))[0])
        with pytest.raises(TargetError, match=r"found after_block:3, beside after_block:0"):
            engines.states(samples, [parse_tap("after_block:3")], 12)
        with pytest.raises(TooLong):
            engines.states([np.array(ids(600), dtype=np.int32)], taps, 600)


def test_answers_are_the_targets_own_in_order(folders: dict[str, Path], load_tiny: LoadTiny, tmp_path: Path) -> None:
    prompts = [ids(n) for n in (4, 9, 6, 5)]
    told = [0, 0]

    def count(tokens: int, answers: int) -> None:
        told[0], told[1] = told[0] + tokens, told[1] + answers

    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"]):
        answers = opened(folders["llama"], tmp_path).generate(prompts, 8, 0.0, 1.0, 0, told=count)
    assert answers == load_tiny().generate(prompts, 8, 0.0, 1.0, 0)
    assert told == [sum(len(answer.ids) for answer in answers), 4]


def test_engines_encode_only_what_they_were_started_for(folders: dict[str, Path], tmp_path: Path) -> None:
    taps = [parse_tap(name) for name in TAPS]
    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"]):
        engines = opened(folders["llama"], tmp_path)
        assert engines.encodes(RAW, taps)
        assert not engines.encodes(RAW, taps[::-1])
        assert not engines.encodes(short_spec("fp8", 2, 32, "float32"), taps)


def test_engines_started_before_a_codec_was_fitted_are_given_it(folders: dict[str, Path], tmp_path: Path) -> None:
    spec, taps = short_spec("rotated:4", 2, 32, "float32"), [parse_tap(name) for name in TAPS]
    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"]) as (engine, _):
        replace(engine.file, codec=None).write(tmp_path / "engines" / "a")
        engines = opened(folders["llama"], tmp_path)
        assert not engines.encodes(RAW, taps)
        engines.adopt(spec, tmp_path / "codec")
        assert engines.encodes(spec, taps)
        engines.adopt(RAW, None)
        found = EngineFile.read(tmp_path / "engines" / "a")
        assert (found.codec, found.basis) == (spec.to_json(), str(tmp_path / "codec")), "given once"
        engines.endpoints[0].reopen()


def test_engines_that_differ_or_serve_another_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def start(name: str, model: str, taps: tuple[str, ...] = TAPS) -> FakeEngine:
        return FakeEngine(tmp_path / "engines" / name, str(folders[model]), taps, RAW)

    with pytest.raises(TargetError, match="start one: headrace engine"):
        opened(folders["llama"], tmp_path)
    with start("a", "llama"):
        with pytest.raises(TargetError, match="engines of the target in"):
            opened(folders["qwen3"], tmp_path)
        with start("b", "llama", TAPS[::-1]), pytest.raises(TargetError, match="engines with the same encoded"):
            opened(folders["llama"], tmp_path)


def test_raw_columns_of_another_size_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"]):
        file = opened(folders["llama"], tmp_path).file
    for part, dtype in ((bytes(10), "float32"), (bytes(3 * 32 * 4), "int8")):
        with pytest.raises(DeliveryRefused, match="bytes of raw columns"):
            delivered_states(Delivery("states", "", 1, [(0, 1)], [part], dtype), file)


def test_the_dtype_is_what_the_engines_say(folders: dict[str, Path], tmp_path: Path) -> None:
    cfg = run_file(folders["llama"], tmp_path)
    auto = cfg.model_copy(update={"target": cfg.target.model_copy(update={"dtype": "auto"})})
    with fake_endpoint(tmp_path / "engines" / "a", folders["llama"], dtype="bfloat16"):
        assert open_engines(auto, RunFolder(tmp_path)).spec.dtype == "bfloat16"
        with pytest.raises(TargetError, match="engines that run in float32, found bfloat16 in"):
            open_engines(cfg, RunFolder(tmp_path))
        with (
            fake_endpoint(tmp_path / "engines" / "b", folders["llama"]),
            pytest.raises(TargetError, match="same dtype"),
        ):
            open_engines(auto, RunFolder(tmp_path))
