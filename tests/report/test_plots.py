"""Plots are SVG text that carries its labels."""

from headrace.report.plots import bars, columns, cost, curve


def test_bars_draw_one_bar_a_label() -> None:
    svg = bars(["ours", "floor"], [1.9, 1.2], [(1.8, 2.0), None])
    assert svg.startswith("<svg")
    assert "1.90" in svg


def test_a_curve_names_its_lines() -> None:
    assert "floor" in curve([("ours", [1, 2], [1.0, 2.0]), ("floor", [1, 2], [1.0, 1.1])], "step", "tau", floor=1.0)


def test_columns_are_numbered_from_one() -> None:
    assert "60%" in columns([0.6, 0.3], "slot", "accepted")


def test_cost_is_in_dollars_only_where_every_price_is_known() -> None:
    points = [{"codec": "raw", "disk_bytes": 2e9, "hours": 3.0, "usd": 5.0, "way": "store"}]
    assert "US dollars" in cost(points)
    assert "disk budget, GB" in cost(points)
    assert "hours" in cost([*points, {**points[0], "usd": None}])
