"""`make prove-targets`: every public configuration of a target and a drafter, beside what headrace derives.

In: the public data beside the project. Out: claims, and the tables of docs/targets.md, which are printed; `--write`
puts them into the page.

usage: targets.py [--write]
"""

import sys
from pathlib import Path

from claims import Claims
from tables import show

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "targets.md"
sys.path.insert(0, str(ROOT))

from tests.drafter import target_table as table  # noqa: E402


def main() -> None:
    """Derive, print, judge."""
    if not table.DATA.exists():
        sys.exit(f"needs the public data in {table.DATA}")
    targets, drafters = table.all_rows()
    tables = {"targets": table.target_table(targets), "drafters": table.drafter_table(drafters)}
    show(tables, PAGE)
    judge(targets, drafters)


def judge(targets: list[table.TargetRow], drafters: list[table.DrafterRow]) -> None:
    """The claims of `make prove-targets`."""
    claims = Claims("prove-targets")
    derived = [row for row in targets if row.shape is not None]
    silent = [row.name for row in targets if row.shape is None and not row.refused]
    claims.add(
        "each target configuration gives a drafter and taps, or a refusal that names why",
        "39, none without either",
        f"{len(targets)}: {len(derived)} derived, {len(targets) - len(derived)} refused, {len(silent)} without either",
        len(targets) == 39 and not silent,
    )
    matched = [row for row in drafters if row.agrees or row.differences]
    agreeing = sum(len(row.agrees) for row in drafters)
    pairs = [pair for row in drafters for pair in row.differences.values()]
    unexplained = [pair for pair in pairs if not pair[2]]
    claims.add(
        "each published drafter is read; its fields are those derived for its target, or the difference is explained",
        "54, no field without a reason",
        f"{len(drafters)} read, {len(matched)} of a derived target: {agreeing} fields equal, "
        f"{len(pairs) - len(unexplained)} explained, {len(unexplained)} not",
        len(drafters) == 54 and bool(matched) and not unexplained,
    )
    claims.close()


if __name__ == "__main__":
    main()
