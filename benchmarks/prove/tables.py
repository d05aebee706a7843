"""Tables that a proof makes and a page holds.

In: tables in Markdown by name. Out: printed; with `--write` on the command line also set into the page, between
`<!-- name -->` and `<!-- end -->`.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path


def show(tables: Mapping[str, str], page: Path) -> None:
    """Print each table, and write it into the page if asked."""
    for text in tables.values():
        print(text)
    if "--write" not in sys.argv[1:]:
        return
    content = page.read_text(encoding="utf-8")
    for name, text in tables.items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        content = block.sub(lambda found, text=text: found[1] + text + found[2], content)  # type: ignore[misc]
    page.write_text(content, encoding="utf-8")
