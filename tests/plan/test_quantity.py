import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PlanError
from headrace.plan.quantity import bytes_text, money_text, parse_bytes, parse_rate, rate_text, si_text, time_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4 TB", 4e12),
        ("1.5TiB", 1.5 * 2**40),
        ("500 GB", 5e11),
        ("0", 0),
        (12, 12),
        ("1,000 MiB", 1000 * 2**20),
        ("2e3", 2e3),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text: str | float, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["4 Tb", "4 Tbit", "many", "-1 GB", "", "4 XB", float("nan"), float("inf")])
def test_what_is_no_size_is_refused(text: str | float) -> None:
    with pytest.raises(PlanError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1 Gbit/s", 125e6), ("15 MB/s", 15e6), ("10 Gbps", 1.25e9), ("10 Gb/s", 1.25e9), ("1 GB/s", 1e9), (5.0, 5.0)],
)
def test_rates_tell_bits_from_bytes(text: str | float, value: float) -> None:
    assert parse_rate(text) == value


@pytest.mark.parametrize("text", ["15 MB", "fast", "1 Gbit/h", "0 Gbit/s", 0, float("nan")])
def test_what_is_no_rate_is_refused(text: str | float) -> None:
    with pytest.raises(PlanError):
        parse_rate(text)


def test_the_data_set_is_shown_in_si_and_binary_units() -> None:
    assert bytes_text(913_786 * 800 * 51_200) == "37.43 TB (34,858 GiB)"


def test_times_and_rates_are_shown_in_units_people_plan_in() -> None:
    assert time_text(42) == "42 s"
    assert time_text(3600) == "60 min"
    assert time_text(25 * 3600) == "25.0 h"
    assert time_text(1058 * 3600) == "1,058 h (44.1 days)"
    assert rate_text(147.1e6) == "147.1 MB/s (1.18 Gbit/s)"
    assert money_text(None) == "no price"
    assert money_text(67.263) == "$67.26"


@given(st.floats(1, 1e18))
def test_a_size_that_is_shown_reads_back(value: float) -> None:
    assert parse_bytes(si_text(value) + "B") == pytest.approx(value, rel=6e-3)
