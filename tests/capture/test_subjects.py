from pathlib import Path

import pytest
import torch

from headrace.capture.hypotheses import relative_error
from headrace.capture.subjects import EngineSubject, Reference, TransformersSubject
from headrace.codec.registry import open_codec
from headrace.taps import parse_tap, parse_taps
from headrace.target.transformers_target import TransformersTarget
from tests.engines import RAW, TAPS, fake_endpoint, ids

EVERY = ("embedding", *(f"after_block:{n}" for n in range(5)), "final:pre_norm", "final:post_norm")


def test_a_reference_gives_every_tap_without_a_captures_hooks(target: TransformersTarget) -> None:
    taps = parse_taps(EVERY, 5)
    reference = Reference(target).states(ids(12), taps)
    captured = TransformersSubject(target, taps).states(ids(12))
    for n, tap in enumerate(taps):
        assert relative_error(captured[:, n], reference[tap]) < 0.02, tap


def test_the_target_itself_tells_logprobs_of_each_token(target: TransformersTarget) -> None:
    subject = TransformersSubject(target, parse_taps(TAPS, 5))
    assert [str(tap) for tap in subject.columns] == [*TAPS, "final:pre_norm"]
    states, told = subject.with_logprobs(ids(12))
    assert states.shape == (12, 3, 32)
    assert [token in row for token, row in zip(ids(12)[1:], told[1:], strict=True)] == [True] * 11
    assert subject.features(ids(12), open_codec(RAW)) is None
    assert subject.max_tokens == 512


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ([], 2048),
        (["--max-num-batched-tokens", "16"], 16),
        (["--max_num_batched_tokens=64"], 64),
        (["--max-num-batched-tokens"], 2048),
    ],
)
def test_a_prefill_chunk_is_what_the_flags_say(
    tmp_path: Path, tiny_folder: Path, flags: list[str], tokens: int
) -> None:
    with fake_endpoint(tmp_path, tiny_folder) as (_, endpoint):
        assert EngineSubject(endpoint, flags, True).chunk_tokens == tokens


def test_an_engine_is_asked_for_raw_and_encoded_states(tmp_path: Path, tiny_folder: Path) -> None:
    with fake_endpoint(tmp_path, tiny_folder) as (engine, endpoint):
        subject = EngineSubject(endpoint, [], encodes=True)
        raw = subject.states(ids(9))
        features = subject.features(ids(9), open_codec(RAW))
        assert features is not None
        assert torch.equal(features.view(9, 2, 32), raw[:, [0, 1]])
        assert subject.max_tokens == 511
        assert subject.columns[-1] == parse_tap("final:pre_norm")
        engine.fault = "slow"
        subject.abort(ids(9))  # gone before the answer, and no error
        assert EngineSubject(endpoint, [], encodes=False).features(ids(9), open_codec(RAW)) is None
