"""Public configurations: a drafter is derived or refused with a reason; published ones agree, or it is said why."""

import pytest

from tests.drafter import target_table as table

pytestmark = pytest.mark.skipif(not table.DATA.exists(), reason=f"needs the public data in {table.DATA}")


@pytest.fixture(scope="module")
def rows() -> tuple[list[table.TargetRow], list[table.DrafterRow]]:
    return table.all_rows()


def test_every_target_has_a_drafter_or_a_reason(rows: tuple[list[table.TargetRow], list[table.DrafterRow]]) -> None:
    targets, _ = rows
    assert len(targets) == 39
    for row in targets:
        assert (row.shape is None) == bool(row.refused), row.name
        assert row.shape is None or (len(row.taps) == 5 and row.reasons), row.name
    assert sum(row.shape is not None for row in targets) >= 28


def test_every_published_drafter_is_read_and_each_difference_explained(
    rows: tuple[list[table.TargetRow], list[table.DrafterRow]],
) -> None:
    targets, drafters = rows
    assert len(drafters) == 54
    assert set(table.TARGETS.values()) <= {row.name for row in targets}
    assert set(table.TARGETS) <= {row.name for row in drafters}
    unexplained = {
        f"{row.name} {name}": pair for row in drafters for name, pair in row.differences.items() if not pair[2]
    }
    assert not unexplained
    assert sum(len(row.agrees) for row in drafters) >= 100


def test_a_reason_that_no_drafter_needs_is_not_kept(
    rows: tuple[list[table.TargetRow], list[table.DrafterRow]],
) -> None:
    _, drafters = rows
    used = {(who, name) for row in drafters for name in row.differences for who in (row.name, row.kind)}
    assert set(table.WHY) <= used


def test_the_tables_hold_a_row_each(rows: tuple[list[table.TargetRow], list[table.DrafterRow]]) -> None:
    targets, drafters = rows
    assert len(table.target_table(targets).splitlines()) == 41
    assert len(table.drafter_table(drafters).splitlines()) == 56
