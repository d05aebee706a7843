import pytest

from headrace.errors import PlanError
from headrace.plan.geometry import geometry_from_config
from headrace.plan.inputs import choose_taps, make_inputs, split_taps
from tests.plan.models import LLAMA, QWEN_27B, TAPS

TARGET = geometry_from_config(QWEN_27B, "Qwen3.6-27B")


def test_numbers_are_z_labs_and_said_to_be() -> None:
    taps, notes = choose_taps(TAPS, 5, TARGET)
    assert [t.block for t in taps] == [1, 16, 31, 46, 61]
    assert "z-lab" in notes[0]
    assert "after_block:61" in notes[0]


def test_names_and_numbers_may_be_mixed() -> None:
    taps, notes = choose_taps(["-1", "after_block:3", "final:pre_norm"], 5, TARGET)
    assert [str(t) for t in taps] == ["embedding", "after_block:3", "final:pre_norm"]
    assert len(notes) == 1
    assert choose_taps(["after_block:3"], 5, TARGET)[1] == ()


def test_without_taps_the_default_rule_places_the_published_ones() -> None:
    taps, notes = choose_taps(None, 5, TARGET)
    assert [t.block for t in taps] == [1, 16, 31, 46, 61]
    assert "default rule" in notes[0]


@pytest.mark.parametrize("items", [["64"], ["after_block:64"], ["1", "after_block:1"], ["x"], ["-2"], []])
def test_taps_that_the_target_does_not_have_are_refused(items: list[str]) -> None:
    with pytest.raises(PlanError):
        choose_taps(items, 5, TARGET)


def test_a_target_too_shallow_for_the_default_rule_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="deep enough"):
        choose_taps(None, 7, geometry_from_config(LLAMA, "llama"))


def test_the_flag_is_split_at_commas() -> None:
    assert split_taps("1, 16,final:pre_norm") == ["1", "16", "final:pre_norm"]
    with pytest.raises(PlanError):
        split_taps(" , ")


@pytest.mark.parametrize("given", [{"epochs": 0}, {"speed": 3}, {"target_dtype": "int3"}, {"dtype": "int8"}])
def test_an_input_that_cannot_be_is_named(given: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=next(iter(given))):
        make_inputs(**given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("params_billion", float("inf")),
        ("params_billion", float("nan")),
        ("num_samples", 10**400),
        ("mean_tokens", 1e308),
        ("max_usd", float("inf")),
        ("epochs", 10**400),
        ("num_layers", 10**9),
        ("hidden_size", 10**400),
    ],
)
def test_numbers_beyond_any_run_are_named_and_cut(key: str, value: float) -> None:
    with pytest.raises(PlanError, match=key) as caught:
        make_inputs(**{key: value})
    assert len(str(caught.value)) < 300
