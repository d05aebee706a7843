"""Whether a run's states are still those that its codec was fitted on.

In: states of one record after the other, where they are encoded. Out: how many records leave a larger share of their
energy outside the kept directions than the fit did, by source, and a note for whoever watches the capture. Only a
latent can drift so; a codec without a basis gives nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from headrace.codec.base import Codec
from headrace.codec.quantised import QuantisedCodec

TIMES = 2.0  # a record that loses so many times what the slice lost on average has drifted
AT_LEAST = 0.01  # share of energy; below it a multiple of nearly nothing is still nothing
ALARM = 0.1  # share of all records; short ones vary
SOURCE_ALARM = 0.25  # share of a source's records


@dataclass
class Drift:
    """The count of one capture."""

    codec: QuantisedCodec
    expected: float
    by_source: dict[str, list[int]] = field(default_factory=dict)  # records that drifted, records seen
    lost: float = 0.0
    worst: tuple[float, int] = (0.0, -1)

    @classmethod
    def of(cls, codec: Codec) -> Self | None:
        """For a codec whose fit says what it kept; None for any other."""
        if not isinstance(codec, QuantisedCodec) or codec.basis is None or codec.basis.projection_RW is None:
            return None
        kept = codec.basis.told.get("energy_kept")
        return None if kept is None else cls(codec, 1.0 - float(kept))

    @property
    def limit(self) -> float:
        """The share of its energy that a record may lose."""
        return max(TIMES * self.expected, AT_LEAST)

    @property
    def counts(self) -> tuple[int, int]:
        """Records that drifted, and records seen."""
        return sum(d for d, _ in self.by_source.values()), sum(n for _, n in self.by_source.values())

    @property
    def alarm(self) -> bool:
        """Whether too many records drifted, of all or of one source."""
        drifted, seen = self.counts
        return drifted > ALARM * seen or any(d > SOURCE_ALARM * n for d, n in self.by_source.values())

    def see(self, row: int, source: str, states_TLH: torch.Tensor) -> None:
        """Count one record's states [T, L, H]; escaped tokens, which are kept in 16 bits, do not count."""
        self.count(row, source, lost_share(self.codec, states_TLH))

    def count(self, row: int, source: str, lost: float) -> None:
        """Count one record that was seen elsewhere. Args: lost: its `lost_share`."""
        counts = self.by_source.setdefault(source, [0, 0])
        counts[0], counts[1] = counts[0] + (lost > self.limit), counts[1] + 1
        self.lost += lost
        self.worst = max(self.worst, (lost, row))

    def summary(self) -> dict[str, Any]:
        """Shares of energy, and records that drifted, by source; empty when nothing was seen."""
        _, seen = self.counts
        if not seen:
            return {}
        return {
            "fitted": round(self.expected, 5),
            "limit": round(self.limit, 5),
            "lost": round(self.lost / seen, 5),
            "worst": round(self.worst[0], 5),
            "worst_row": self.worst[1],
            "num_records": seen,
            "drifted": {source: n for source, (n, _) in sorted(self.by_source.items()) if n},
            "alarm": self.alarm,
        }

    def note(self) -> str | None:
        """What to tell whoever watches, where too many records drifted."""
        if not self.alarm:
            return None
        drifted, seen = self.counts
        sources = ", ".join(f"{source} {d} of {n}" for source, (d, n) in sorted(self.by_source.items()) if d)
        return (
            f"{drifted} of {seen} records lose more than {self.limit:.1%} of their energy, the fit lost "
            f"{self.expected:.1%} ({sources}): fit the codec on a slice that has these sources"
        )


def lost_share(codec: QuantisedCodec, states_TLH: torch.Tensor) -> float:
    """The share of the scaled states' energy outside the kept directions, escapes left out, before quantising."""
    assert codec.basis is not None
    own = states_TLH[~codec.escaped(states_TLH)]
    if not len(own):
        return 0.0
    scale_L1 = codec.basis.inverse_rms_L.to(own.device)[:, None]
    energy = float((own.float() * scale_L1).square().sum())
    return 1.0 - float(codec.coordinates(own).square().sum()) / energy if energy else 0.0
