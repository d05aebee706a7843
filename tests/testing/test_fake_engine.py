from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.codec.spec import CodecSpec
from headrace.config import TargetConfig
from headrace.taps import parse_tap
from headrace.target.channel import DeliveryRefused, EngineGone
from headrace.target.endpoints import Endpoint, Request
from headrace.target.engine_target import delivered_states
from headrace.target.transformers_target import load_target
from headrace.testing.fake_engine import CHUNK, STATE_FAULTS
from headrace.testing.tiny_target import save_tiny_target
from tests.engines import EngineProcess, fake_endpoint, ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def reference(model: Path, prompt: tuple[int, ...], names: list[str]) -> torch.Tensor:
    target = load_target(TargetConfig(model=str(model), dtype="float32", device="cpu"))
    taps = [parse_tap(name) for name in names]
    return target.states([np.array(prompt, dtype=np.int32)], taps, len(prompt))[0]


def test_a_sound_engine_gives_the_targets_own_states_in_sorted_columns(model: Path, tmp_path: Path) -> None:
    with fake_endpoint(tmp_path, model, taps=("after_block:2", "after_block:0")) as (_, endpoint):
        assert endpoint.file.taps == ["after_block:0", "after_block:2", "final:pre_norm"]
        assert endpoint.file.encoded == [1, 0]
        assert endpoint.file.layer_ids == [1, 3, 5]
        raw = endpoint.ask(Request(ids(40), "states")).delivery
        encoded = endpoint.ask(Request(ids(40))).delivery
        assert raw is not None
        assert encoded is not None
        expected = reference(model, ids(40), endpoint.file.taps)
        assert torch.equal(delivered_states(raw, endpoint.file), expected)
        payload = torch.frombuffer(bytearray(b"".join(encoded.parts)), dtype=torch.float32).view(40, 2, 32)
        assert torch.equal(payload, expected[:, [1, 0]])


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_each_fault_spoils_what_is_delivered_or_told(model: Path, tmp_path: Path, fault: str) -> None:
    """From the second request on: the prefix cache of a first one is empty."""
    prompt = ids(3 * CHUNK)
    with fake_endpoint(tmp_path, model, fault) as (engine, endpoint):
        expected = reference(model, prompt, endpoint.file.taps)
        for last in (False, True):
            try:
                delivery = endpoint.ask(Request(prompt, "states")).delivery
            except DeliveryRefused:
                continue
            assert delivery is not None
            right = torch.equal(delivered_states(delivery, endpoint.file), expected)
            assert not (last and right)
        engine.fault = ""
        delivery = endpoint.ask(Request(prompt, "states")).delivery
        assert delivery is not None
        assert torch.equal(delivered_states(delivery, endpoint.file), expected)


def test_a_fault_is_committed_so_many_times(model: Path, tmp_path: Path) -> None:
    with fake_endpoint(tmp_path, model, "errors_500", times=2) as (engine, _):
        request = Request(ids(4)).body("fake", "0" * 32)
        assert [engine.completion(request)[0] for _ in range(3)] == [500, 500, 200]


def test_it_runs_as_a_process_that_can_be_killed_and_started_again(model: Path, tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path / "a", model, CodecSpec("raw", 0, 2, 32, "bfloat16"))
    try:
        engine.wait_until_healthy()
        engine.kill()
        engine.start("death")
        engine.wait_until_healthy()
        endpoint = Endpoint(tmp_path / "a", 10)
        with pytest.raises(EngineGone, match=r"engine a at .* found the connection broke"):
            endpoint.ask(Request(ids(8)))
        with pytest.raises(EngineGone):
            endpoint.reopen()
    finally:
        engine.kill()
