"""Same, tie or differs, and where."""

from headrace.evaluate.identity import Identity, compare

GAPS = [1.0, 5e-5, 0.2]


def test_equal_answers_are_the_same() -> None:
    assert compare([1, 2, 3], [1, 2, 3], GAPS, 1e-4) == Identity("same")


def test_a_divergence_at_a_near_tie_is_a_tie() -> None:
    assert compare([1, 2, 3], [1, 9], GAPS, 1e-4) == Identity("tie", 1, 5e-5)


def test_a_divergence_with_a_clear_winner_differs_and_says_where() -> None:
    assert compare([1, 2, 3], [1, 2, 9], GAPS, 1e-4) == Identity("differs", 2, 0.2)


def test_only_the_first_divergence_counts() -> None:
    assert compare([1, 2, 3], [8, 2, 9], [5e-5, 1.0, 1.0], 1e-4).verdict == "tie"
    assert compare([1, 2, 3], [8, 9, 3], [1.0, 5e-5, 1.0], 1e-4).verdict == "differs"


def test_an_answer_that_stops_early_or_late_differs() -> None:
    assert compare([1, 2, 3], [1, 2], GAPS, 1e-4) == Identity("differs", 2)
    assert compare([1, 2], [1, 2, 3], GAPS, 1e-4) == Identity("differs", 2)
