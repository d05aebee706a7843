from hypothesis import given
from hypothesis import strategies as st

from headrace.config import TrainConfig
from headrace.train.schedule import learning_rate, steps_within

KINDS = st.sampled_from(["cosine", "linear", "wsd"])
RUNS = st.tuples(st.integers(1, 500), st.floats(0, 0.9), st.floats(0, 1), KINDS, st.floats(0.01, 1))


def settings(lr: float, ratio: float, warmup: float, kind: str = "cosine", decay: float = 0.2) -> TrainConfig:
    return TrainConfig.model_validate(
        {"lr": lr, "min_lr_ratio": ratio, "warmup_ratio": warmup, "schedule": kind, "decay_ratio": decay}
    )


@given(RUNS)
def test_the_rate_rises_to_the_peak_and_ends_at_the_floor(run: tuple[int, float, float, str, float]) -> None:
    num_steps, warmup, ratio, kind, decay = run
    cfg = settings(2.0, ratio, warmup, kind, decay)
    rates = [learning_rate(step, num_steps, cfg) for step in range(num_steps + 3)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= 2.0 for rate in rates) or ratio == 0
    assert rates[-1] >= 2.0 * ratio - 1e-12


def test_a_long_run_meets_its_ends_exactly() -> None:
    rates = [learning_rate(step, 100, settings(1e-3, 0.02, 0.04)) for step in range(100)]
    assert rates[0] == 0.25e-3
    assert rates[4] == 1e-3
    assert abs(rates[99] - 2e-5) < 1e-12


def test_a_run_without_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, 10, settings(1.0, 0.1, 0.0)) == 1.0


def test_a_single_step_has_a_rate() -> None:
    assert learning_rate(0, 1, settings(1.0, 0.1, 0.04)) == 1.0


def test_wsd_stays_at_its_peak_until_the_last_part_of_the_run() -> None:
    cfg = settings(1.0, 0.0, 0.1, "wsd", 0.2)
    rates = [learning_rate(step, 100, cfg) for step in range(100)]
    assert set(rates[10:80]) == {1.0}
    assert abs(rates[90] - 0.45) < 1e-12
    assert rates[99] == 0


def test_linear_falls_by_equal_amounts() -> None:
    rates = [learning_rate(step, 11, settings(1.0, 0.0, 0.0, "linear")) for step in range(11)]
    assert all(abs(rate - (1 - step / 10)) < 1e-12 for step, rate in enumerate(rates))


def test_a_plan_fills_the_time_left_with_steps_and_evaluations() -> None:
    planned = steps_within(seconds_left=100.0, step_seconds=1.0, eval_seconds=5.0, eval_every=10, done=20, most=1000)
    assert planned == 20 + int((97.0 - 5.0) / 1.5)


@given(st.floats(-10, 1e4), st.floats(0, 10), st.floats(0, 100), st.integers(0, 50), st.integers(1, 100))
def test_a_plan_never_exceeds_the_run_nor_forgets_steps_taken(
    left: float, step_s: float, eval_s: float, done: int, most: int
) -> None:
    planned = steps_within(left, step_s, eval_s, 10, done, most)
    assert done <= planned <= max(most, done)
