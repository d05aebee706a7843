import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StoreError
from headrace.store.digested import dump_digested, load_digested

LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(exclude_categories=["Cs"]))
OBJECTS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])).filter(lambda k: k != "digest"),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3)),
    max_size=4,
)


@given(value=OBJECTS, indent=st.sampled_from([None, 1]))
def test_what_was_written_is_read_back(value: dict[str, object], indent: int | None) -> None:
    assert load_digested(dump_digested(value, indent).encode(), "x", indent) == value


@pytest.mark.parametrize("indent", [None, 1])
def test_every_bit_flip_is_noticed(indent: int | None) -> None:
    content = dump_digested({"a": 1, "b": ["x", {"c": None}], "d": "é 1.0"}, indent).encode()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError, match="the line"):
            load_digested(bytes(flipped), "the line", indent)


def test_every_cut_is_noticed() -> None:
    content = dump_digested({"a": 1, "b": "two"}).encode()
    for size in range(len(content)):
        with pytest.raises(StoreError):
            load_digested(content[:size], "x")
