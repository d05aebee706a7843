import dataclasses

import pytest

from headrace.source import Hole, Position


def test_positions_and_holes_are_values() -> None:
    assert Position(1, 2, 3, b"i") == Position(1, 2, 3, b"i")
    assert len({Hole(3, b"i", "not finite"), Hole(3, b"i", "not finite")}) == 1


@pytest.mark.parametrize("value", [Position(1, 2, 3, b"i"), Hole(3, b"i", "not finite")])
def test_a_value_cannot_be_changed(value: Position | Hole) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.row = 4  # type: ignore[misc]
