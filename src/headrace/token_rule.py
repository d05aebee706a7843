"""Which tokens of a sample have states: all of them, or those that training can read.

In: a sample's loss mask, and a rule by name. Out: the token span [start, end) that a record holds. A drafter reads
states strictly before an anchor, so that nothing after the last token an anchor may stand on is ever read by it; a loss
that compares with the target's own last states reads one token more; and where every layer of the drafter slides over
a window, nothing that lies a window before the first anchor is read either. Exact: what is left out meets no product.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

_NAME = re.compile(r"(all|context|supervised)(?:/window:([1-9][0-9]*))?")


def eligible_anchors(loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Tokens that the target generated and whose next token it generated too; int64, ascending.

    The anchor of serving is always a generated token: the first is the one that prefill gives.
    """
    trained = loss_mask.astype(bool)
    return np.flatnonzero(trained[:-1] & trained[1:]).astype(np.int64)


@dataclass(frozen=True)
class TokenRule:
    """A rule of a store, named in its manifest: `all`, `context`, `supervised`, the last two also `/window:N`.

    `context`: up to the last eligible anchor, itself left out. `supervised`: one token more, whose last state predicts
    the last trained token. `window`: the drafter's layers all see only what lies less than so many tokens before.
    """

    kind: Literal["all", "context", "supervised"] = "all"
    window: int | None = None

    @classmethod
    def parse(cls, name: str) -> "TokenRule":
        """Read a rule's name. Raises: ConfigError for one that does not exist."""
        found = _NAME.fullmatch(name)
        if found is None or (found[1] == "all" and found[2]):
            raise ConfigError(
                "a token rule: all, context, supervised, or one of the last two /window:N",
                name,
                "see docs/formats/store-1.md",
            )
        kind: Literal["all", "context", "supervised"] = found[1]  # type: ignore[assignment]
        return cls(kind, int(found[2]) if found[2] else None)

    def __str__(self) -> str:
        """Its name in a manifest."""
        return self.kind if self.window is None else f"{self.kind}/window:{self.window}"

    def span(self, loss_mask: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """The tokens [start, end) that have states; (0, 0) for a sample that no anchor can stand in."""
        if self.kind == "all":
            return 0, len(loss_mask)
        anchors = eligible_anchors(loss_mask)
        if not len(anchors):
            return 0, 0
        start = 0 if self.window is None else max(0, int(anchors[0]) - self.window + 1)
        return start, int(anchors[-1]) + (self.kind == "supervised")


ALL_TOKENS = TokenRule()
