"""`make prove-masks`: loss masks beside independent references, over every public template and layout of chats.

In: the public data beside the project (rendered masks, templates, chats). Out: claims, and the tables of docs/chats.md,
which are printed; `--write` puts them into the page.

usage: masks.py [--write]
"""

import sys
from pathlib import Path

from claims import Claims
from tables import show

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "chats.md"
sys.path.insert(0, str(ROOT))

from tests.prepare import mask_table as table  # noqa: E402


def main() -> None:
    """Compare, print, judge."""
    if not table.DATA.exists():
        sys.exit(f"needs the public data in {table.DATA}")
    rows = [*table.reference_rows(), *table.marked_rows()]
    made = list(table.cells(table.all_templates()))
    tables = {"references": table.comparison_table(rows), "templates": table.cell_table(made)}
    show(tables, PAGE)
    judge(rows, made)


def judge(rows: list[table.Compared], made: list[table.Cell]) -> None:
    """The claims of `make prove-masks`."""
    claims = Claims("prove-masks")
    turns, equal = sum(row.turns for row in rows), sum(row.equal for row in rows)
    unexplained = sum(len(row.unexplained) for row in rows)
    rendered = sum(row.same_text is not None for row in rows)
    claims.add(
        "masks equal an independent reference, or the difference has a reason",
        "0 turns without one, over 23 rendered masks and 5 marked templates",
        f"{turns} turns of {rendered} masks and {len(rows) - rendered} templates: {equal} equal, "
        f"{turns - equal - unexplained} explained, {unexplained} not",
        unexplained == 0 and rendered == 23 and len(rows) - rendered == 5,
    )
    wrong = [text for cell in made for text in cell.wrong]
    right, refused = sum(cell.right for cell in made), sum(sum(cell.refused.values()) for cell in made)
    templates, files = len({cell.template for cell in made}), len({cell.file for cell in made})
    claims.add(
        "every trained turn holds all that the target wrote and nothing of others",
        "0 wrong turns, over 20 templates and 10 files",
        f"{right} right, {len(wrong)} wrong, {refused} chats refused; {templates} templates, {files} files",
        not wrong and right > 0 and (templates, files) == (20, 10),
    )
    claims.close()


if __name__ == "__main__":
    main()
