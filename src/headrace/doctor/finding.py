"""What the doctor says: one finding a story.

In: a story that a check recognised. Out: whether it is a fault or a lack of data, what shows it, and what to do next.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["fault", "lack of data", "speed", "note"]


@dataclass(frozen=True)
class Finding:
    """`name` is fixed, for programs; `evidence` are figures of the run with their source; a note asks for nothing."""

    name: str
    kind: Kind
    what: str
    evidence: tuple[str, ...]
    next_step: str

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "evidence": list(self.evidence)}
