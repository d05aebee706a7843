"""Plots are SVG text that carries its labels."""

from headrace.report.plots import bars, columns, curve


def test_bars_draw_one_bar_a_label() -> None:
    svg = bars(["ours", "floor"], [1.9, 1.2], [(1.8, 2.0), None])
    assert svg.startswith("<svg")
    assert "1.90" in svg


def test_a_curve_names_its_lines() -> None:
    assert "floor" in curve([("ours", [1, 2], [1.0, 2.0]), ("floor", [1, 2], [1.0, 1.1])], "step", "tau", floor=1.0)


def test_columns_are_numbered_from_one() -> None:
    assert "60%" in columns([0.6, 0.3], "slot", "accepted")
