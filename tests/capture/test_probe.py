from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.capture.probe import (
    LOGPROB_TOLERANCE,
    PROBE_FILE,
    Finding,
    choose_texts,
    failed,
    head_logits,
    kept_probe,
    logprobs_finding,
    raise_failed,
)
from headrace.config import RunFolder
from headrace.errors import CaptureError
from headrace.files import write_json
from headrace.prepare.prepared import PreparedSet
from headrace.target.head import FrozenHead
from tests.capture.conftest import write_set


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


HEAD = FrozenHead(random(30, 8), random(30, 8, seed=1), 0.5 + random(8, seed=2).abs(), norm_eps=1e-6)
IDS = tuple(range(3, 23))


def told(final: torch.Tensor) -> list[dict[int, float]]:
    """Logprobs of each token, as an engine with these last states tells them."""
    rows = head_logits(HEAD, HEAD.normed(final)).log_softmax(-1)
    return [{}, *({token: float(row[token])} for row, token in zip(rows[:-1], IDS[1:], strict=True))]


def test_last_states_that_give_the_engines_predictions_pass() -> None:
    final = random(20, 8, seed=3)
    found = logprobs_finding(final, IDS, told(final), HEAD, "float32")
    assert found.ok
    assert float(found.figures["error"]) < 1e-5


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (HEAD.normed, "the final norm was applied already"),
        (lambda final: torch.cat([final[1:], final[:1]]), "rows are one token early"),
        (lambda final: torch.cat([final[:1], final[:-1]]), "rows are one token late"),
        (lambda final: final + random(20, 8, seed=5), "another block, or other tokens' rows"),
    ],
)
def test_last_states_that_do_not_are_named(spoil: Callable[[torch.Tensor], torch.Tensor], cause: str) -> None:
    final = random(20, 8, seed=3)
    found = logprobs_finding(spoil(final), IDS, told(final), HEAD, "float32")
    assert not found.ok
    assert cause in found.cause
    assert "headrace engine" in found.fix
    assert float(found.figures["error"]) > LOGPROB_TOLERANCE["float32"]


def test_only_so_many_tokens_are_looked_at() -> None:
    final = random(20, 8, seed=3)
    spoilt = torch.cat([final[:12], random(8, 8, seed=5)])
    assert logprobs_finding(spoilt, IDS, told(final), HEAD, "float32", most_tokens=12).ok
    assert not logprobs_finding(spoilt, IDS, told(final), HEAD, "float32").ok


def test_a_soft_cap_and_a_scale_are_the_targets_own() -> None:
    normed = random(4, 8)
    plain = head_logits(HEAD, normed)
    assert torch.allclose(head_logits(replace(HEAD, logit_scale=0.5), normed), plain / 2)
    assert torch.allclose(head_logits(replace(HEAD, softcap=2.0), normed), 2 * torch.tanh(plain / 2))


def test_texts_cover_a_chunk_and_stay_within_the_target(tmp_path: Path) -> None:
    write_set(tmp_path / "set", (40, 30, 35, 20, 3), trained=True)
    prepared = PreparedSet.open(tmp_path / "set")
    texts = choose_texts(prepared, 32, None)
    assert len(texts.one) == 40
    assert texts.shared[:26] == texts.one[:26]
    assert texts.shared[26:] == texts.other
    assert len(texts.long) == 32 * 5 // 4 + 8
    assert all(len(ids) <= 24 for ids in vars(choose_texts(prepared, 32, 24)).values())
    write_set(tmp_path / "short", (3, 2), trained=True)
    with pytest.raises(CaptureError, match="two samples of at least 8 tokens"):
        choose_texts(PreparedSet.open(tmp_path / "short"), 32, None)


def test_failures_are_raised_with_each_cause_and_fix_once(tmp_path: Path) -> None:
    good = Finding("hashes", "all the same", True)
    bad = [Finding("taps", f"text {n}", False, {}, "one block early", "start it right") for n in range(3)]
    assert failed([good, *bad]) == bad
    raise_failed([good], tmp_path)
    with pytest.raises(CaptureError) as caught:
        raise_failed([good, *bad], tmp_path / PROBE_FILE)
    assert str(caught.value).count("one block early") == 1
    assert str(caught.value).count("start it right") == 1
    assert "taps (text 0)" in str(caught.value)


def test_a_manifest_is_told_of_the_last_probe_in_brief(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert kept_probe(folder) is None
    write_json(
        tmp_path / PROBE_FILE, {"ok": True, "made": "now", "num_findings": 3, "failed": [], "findings": [1, 2, 3]}
    )
    assert kept_probe(folder) == {"ok": True, "made": "now", "num_findings": 3, "failed": []}
