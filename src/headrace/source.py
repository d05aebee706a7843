"""The first seam: where records come from, whatever holds them.

In: positions of an epoch's order. Out: for each, in that order, its record or an explicit hole. A folder of
shards, an object store and a server all look like this; lengths and order come from the prepared set, never from here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.record import Record


@dataclass(frozen=True)
class Position:
    """One place in the order of one epoch, and the sample that stands there."""

    epoch: int
    place: int
    row: int
    id: bytes


@dataclass(frozen=True)
class Hole:
    """A sample that the target cannot give, for a cause that will not go away; sticky for the run."""

    row: int
    id: bytes
    reason: str


class Source(Protocol):
    """Records by position."""

    def manifest(self) -> Mapping[str, Any]:
        """Identity and provenance of the states, as in manifest.json."""
        ...

    def records(self, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        """Yield exactly one item for each position, in order, reading ahead within a bound.

        Raises: StoreError for a record that is missing or damaged and not declared a hole.
        """
        ...

    def holes(self) -> Mapping[int, Hole]:
        """Holes declared so far, by row."""
        ...

    def commit(self, position: Position) -> None:
        """Say that nothing before `position` will be asked for again."""
        ...

    def close(self) -> None:
        """Release files and connections; safe to call twice."""
        ...
