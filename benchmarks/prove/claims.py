"""Print claims as rows: claim, needed, measured, verdict; and fail where one falls short.

In: rows from a prove script. Out: a table on stdout and an exit status.
"""

import sys
from dataclasses import dataclass, field


@dataclass
class Claims:
    """The claims of one `make prove-…`."""

    title: str
    _rows: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def add(self, claim: str, needed: str, measured: str, holds: bool) -> None:
        """Record one claim and show it at once."""
        self._rows.append((claim, needed, measured, holds))
        print(f"{'ok  ' if holds else 'FAIL'}  {claim}\n      needed {needed}; measured {measured}", flush=True)

    def close(self) -> None:
        """End the process: 0 if every claim holds, 1 otherwise."""
        short = [claim for claim, _, _, holds in self._rows if not holds]
        print(f"{self.title}: {len(self._rows) - len(short)} of {len(self._rows)} claims hold")
        sys.exit(1 if short or not self._rows else 0)
