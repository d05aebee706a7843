"""The demo's prompts are many, of six kinds, distinct, and always the same."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.prepare.demo import KINDS, demo_prompts


def test_kinds_take_turns_and_every_prompt_is_distinct() -> None:
    rows = demo_prompts(1200)
    texts = [row["messages"][-1]["content"] for row in rows]
    assert len(set(texts)) == 1200
    assert len(KINDS) >= 6
    assert set(Counter(row["source"] for row in rows).values()) == {200}


@given(short=st.integers(1, 60), extra=st.integers(0, 60))
def test_fewer_prompts_are_the_first_of_more(short: int, extra: int) -> None:
    assert demo_prompts(short + extra)[:short] == demo_prompts(short)
