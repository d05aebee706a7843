import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import PlanError
from headrace.plan import tokens
from headrace.plan.tokens import from_chats, from_numbers, from_prepared
from headrace.prepare.prepared import Draft, write_prepared
from headrace.record import sample_id


def test_any_two_means_give_the_third() -> None:
    assert from_numbers(10, 800, 300).mean_answer == 500
    assert from_numbers(10, None, 300, 500).mean == 800
    assert from_numbers(10, 800).answer_tokens is None


@pytest.mark.parametrize("given", [(0, 800), (5, 0), (5, None), (5, float("inf")), (-1, 10), (5, 10, None, 11)])
def test_numbers_that_are_no_data_set_are_refused(given: tuple[int, float | None]) -> None:
    with pytest.raises(PlanError):
        from_numbers(*given)


def test_a_prepared_set_is_counted_exactly(tmp_path: Path) -> None:
    drafts = []
    for length, heldout in ((10, False), (30, True), (60, False)):
        ids = np.arange(length, dtype=np.int32)
        mask = np.r_[np.zeros(length - 4), np.ones(4)].astype(np.uint8)
        drafts.append(Draft(sample_id(ids, mask), ids, mask, "test", heldout))
    write_prepared(tmp_path / "set", drafts, {"fingerprint": "f"})
    found = from_prepared(tmp_path / "set")
    assert (found.num_samples, found.num_tokens, found.answer_tokens, found.longest) == (3, 100, 12, 60)
    assert found.heldout_share == 0.3
    assert found.exact
    with pytest.raises(PlanError, match="a prepared set"):
        from_prepared(tmp_path / "none")


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 80}]},
        {"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}]},
        {"prompt": "x" * 40, "response": "y" * 80},
        {"question": "x" * 40, "answer": "y" * 80},
    ],
)
def test_chats_of_every_layout_are_estimated_and_said_so(tmp_path: Path, row: dict[str, object]) -> None:
    found = from_chats(write(tmp_path / "c.jsonl", [row] * 3))
    assert (found.num_samples, found.mean, found.mean_answer) == (3, 10 + 5 + 20 + 5, 21)
    assert not found.exact
    assert "estimated" in found.origin


def test_chats_are_tokenised_where_a_tokenizer_is_at_hand(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = from_chats(write(tmp_path / "c.jsonl", [{"prompt": "a a a", "response": "a b"}]), str(tmp_path))
    assert (found.mean, found.mean_answer) == (3 + 5 + 2 + 5, 3)
    assert "tokenised" in found.origin


def test_a_large_file_is_sampled_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "WHOLE_FILE_BYTES", 1000)
    rows = [{"prompt": "x" * (4 * (i % 50)), "response": "y" * 40} for i in range(4000)]
    found = from_chats(write(tmp_path / "c.jsonl", rows))
    assert found.num_samples == pytest.approx(4000, rel=0.1)
    assert found.mean == pytest.approx(24.5 + 5 + 10 + 5, rel=0.1)
    assert "about" in found.origin


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"text": "x"}\n'])
def test_files_that_are_no_chats_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError):
        from_chats(path)
    with pytest.raises(PlanError):
        from_chats(tmp_path / "none.jsonl")


@pytest.mark.parametrize("prompt", [-5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("answer", [None, 5.0])
def test_a_prompt_of_no_length_is_refused(prompt: float, answer: float | None) -> None:
    with pytest.raises(PlanError, match="prompt"):
        from_numbers(10, 500, prompt, answer)


def test_three_means_must_agree() -> None:
    assert from_numbers(10, 800, 300.4, 499.9).mean_answer == 499.9
    with pytest.raises(PlanError, match="two of the three"):
        from_numbers(10, 800, 300, 5)
