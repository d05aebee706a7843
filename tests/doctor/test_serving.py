import pytest

from headrace.doctor.evidence import Evidence
from headrace.doctor.serving import common_tail, drifted, script_of
from tests.doctor.stories import drift


@pytest.mark.parametrize(
    ("prompts", "tail"),
    [([[1, 2, 3], [4, 2, 3]], [2, 3]), ([[1, 2, 3]], []), ([[1], [2]], []), ([[2, 3], [9, 2, 3]], [2, 3]), ([], [])],
)
def test_what_all_prompts_end_with(prompts: list[list[int]], tail: list[int]) -> None:
    assert common_tail(prompts) == tail


@pytest.mark.parametrize(
    ("text", "script"),
    [("What is 12 + 3?", "LATIN"), ("сколько будет", "CYRILLIC"), ("你好世界你好 world", "CJK"), ("1 + 1", "")],
)
def test_the_script_of_a_chat(text: str, script: str) -> None:
    assert script_of([{"role": "user", "content": text}]) == script


def test_few_drifted_records_are_no_drift() -> None:
    assert drifted(Evidence(captured=drift(39))) is None
    assert drifted(Evidence(captured=drift(40))) is not None
    assert drifted(Evidence()) is None
