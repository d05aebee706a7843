"""Masks beside independent references: rendered masks, marked templates, and every template over every layout."""

import pytest

from tests.prepare import mask_table as table

PAGE = table.ROOT / "docs" / "chats.md"
pytestmark = pytest.mark.skipif(not table.DATA.exists(), reason="needs the shared public data beside the project")


@pytest.fixture(scope="module")
def rows() -> list[table.Compared]:
    return [*table.reference_rows(), *table.marked_rows()]


def test_every_difference_to_a_reference_has_a_reason(rows: list[table.Compared]) -> None:
    assert sum(row.same_text is not None for row in rows) == 23
    assert len(rows) == 28
    assert not [(row.name, row.unexplained) for row in rows if row.unexplained]
    assert all(row.turns == row.equal + sum(row.reasons.values()) for row in rows)


def test_the_samples_are_the_references_texts(rows: list[table.Compared]) -> None:
    """But gpt-oss's, whose chat was rendered as history, the thinking kept."""
    assert [row.name for row in rows if row.same_text is False] == ["gpt-oss_gpt-oss"]


def test_the_page_shows_this_table(rows: list[table.Compared]) -> None:
    assert table.comparison_table(rows) in PAGE.read_text(encoding="utf-8"), "benchmarks/prove/masks.py --write"


def test_what_has_no_reason_is_found() -> None:
    assert table.explain("yes<|im_end|>", "yes<|im_end|>") == ""
    assert table.explain("yes<|im_end|>\n", "yes<|im_end|>") == table.NEWLINE
    assert table.explain("yes", "yes<|im_end|>") is None
    assert table.explain("hi\nyes<|im_end|>", "yes<|im_end|>") is None


@pytest.mark.parametrize("name", ["SmolLM2", *(n for n in table.ENDS if n != "SmolLM2"), "qwen2_5", "qwen3", "qwen3_6"])
def test_every_trained_turn_is_the_targets_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats a file here; `make prove-masks` takes every template and twelve."""
    monkeypatch.setattr(table, "CHATS_A_CELL", 2)
    made = list(table.cells([name]))
    assert not [text for cell in made for text in cell.wrong]
    assert sum(cell.right for cell in made) > 0 or name == "deepseekv3"


def test_a_turn_that_trains_the_user_is_judged_wrong() -> None:
    cell = table.Cell("t", "f")
    template = table.opened(table.template_text("qwen2_5"), "<|im_end|>")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ((ids, mask),) = table.masked_samples(template, messages)
    table.judge(cell, template, messages, [(ids, mask)], "x")
    table.judge(cell, template, messages, [(ids, mask * 0 + 1)], "x")
    table.judge(cell, template, messages, [(ids[:-2], mask[:-2])], "x")
    assert (cell.right, len(cell.wrong)) == (1, 2)
