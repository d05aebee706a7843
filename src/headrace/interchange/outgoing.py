"""A run's states on their way into another program's files.

In: a run folder, and the target's folder where a final norm is still to be applied. Out: each stored sample with its
states in feature taps and last state; what the other program cannot take is refused before the first byte is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.codec.base import record_states
from headrace.codec.registry import open_codec
from headrace.config import RunFolder
from headrace.errors import ExportError
from headrace.files import Stage
from headrace.prepare.model_files import load_config
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Sample, digest
from headrace.store.reader import StoreReader
from headrace.taps import FINAL_POST_NORM, FINAL_PRE_NORM, Tap, check_engine_order, parse_tap
from headrace.target.head import FrozenHead, load_head
from headrace.target.weights import weights_hash
from headrace.token_rule import ALL_TOKENS

FINALS = (FINAL_PRE_NORM, FINAL_POST_NORM)


@dataclass(frozen=True, eq=False)
class Sent:
    """One sample: `features_TLH` in the order of the feature taps, and the last state [T, H] if one was asked for."""

    sample: Sample
    features_TLH: torch.Tensor
    final_TH: torch.Tensor | None


class Outgoing:
    """A run opened for export. `rows` are those with a record, training rows first, each kind ascending."""

    def __init__(self, folder: RunFolder, model: Path | None = None) -> None:
        """Args: model: the target's folder, to apply its final norm.

        Raises: ExportError for a prepared set that is not the states' own, taps that do not ascend, and another
        target; StoreError and PrepareError as their readers do.
        """
        self.folder = folder
        self.prepared = PreparedSet.open(folder.prepared)
        self.reader = StoreReader(folder.states)
        self.manifest = self.reader.manifest
        if self.manifest.prepared != self.prepared.fingerprint:
            found = f"{self.prepared.fingerprint}, not {self.manifest.prepared}"
            raise ExportError("the prepared set these states were captured from", found, "give the states' own run")
        self.codec = open_codec(self.manifest.codec, folder.states)
        self.num_blocks = int(self.manifest.target["num_blocks"])
        taps = tuple(parse_tap(name) for name in self.manifest.taps)
        self.final: Tap | None = taps[-1] if taps[-1] in FINALS else None
        self.feature_taps = taps[:-1] if self.final is not None else taps
        if self.manifest.token_rule != str(ALL_TOKENS):
            found = f"the token rule {self.manifest.token_rule}"
            raise ExportError("states of every token, which peers read", found, "capture with capture.tokens all")
        check_engine_order(self.feature_taps, self.num_blocks)
        self.head = None if model is None else self._head(model)
        stored = self.reader.rows
        heldout = self.prepared.heldout[stored]
        if not len(stored):
            raise ExportError("at least one record", f"none in {folder.states}", "capture first")
        self.num_heldout = int(heldout.sum())
        self.rows: list[int] = [*stored[~heldout].tolist(), *stored[heldout].tolist()]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.codec.spec.hidden_size

    def check_final(self, wanted: Tap, peer: str) -> None:
        """Refuse a peer that wants a last state which these states neither hold nor lead to. Raises: ExportError."""
        if self.final == wanted or (self.final == FINAL_PRE_NORM and wanted == FINAL_POST_NORM and self.head):
            return
        hint = "capture with capture.final_state: true (final:pre_norm)"
        if wanted == FINAL_POST_NORM:
            hint += ", then export with --target and the target's folder, whose final norm is applied"
        elif self.final == FINAL_POST_NORM:
            hint += "; a final norm cannot be taken back, and it would be applied twice"
        raise ExportError(f"{wanted} as the last tap, which {peer} reads", str(self.final or "no last state"), hint)

    def sent(self, row: int, wanted: Tap | None) -> Sent:
        """One sample, the last state as `wanted`. Raises: StoreError for a damaged record."""
        sample = self.prepared.sample(row)
        states_TLH = record_states(self.reader.read(row, sample.id), self.codec)
        if self.final is None:
            return Sent(sample, states_TLH, None)
        features_TLH, final_TH = states_TLH[:, :-1], states_TLH[:, -1]
        if wanted is None:
            return Sent(sample, features_TLH, None)
        if wanted != self.final:
            assert self.head is not None
            final_TH = self.head.normed(final_TH).to(states_TLH.dtype)
        return Sent(sample, features_TLH, final_TH)

    def stage(self, out: Path, peer: str, **chosen: Any) -> Stage:
        """The record of an export in its own folder, so that a killed one goes on and another is refused."""
        rows = digest(*(row.to_bytes(8, "little") for row in self.rows)).hex()
        identity = {"to": peer, "states": self.manifest.identity(), "rows": rows, **chosen}
        return Stage(out, f"export to {peer}", identity)

    def told(self, progress: Progress, rows: Sequence[int], done: int = 0) -> Iterator[tuple[int, int]]:
        """Number and row of each that is still to be written, told to `progress`."""
        progress.start("export", len(rows), "samples", done)
        for number, row in enumerate(rows[done:], done):
            yield number, row
            progress.advance(number + 1)
        progress.end()

    def close(self) -> None:
        """Close the shards."""
        self.reader.close()

    def _head(self, model: Path) -> FrozenHead:
        found, wanted = weights_hash(model), self.manifest.target["weights_hash"]
        if found != wanted:
            raise ExportError(
                f"the target of these states (weights {wanted})", f"{found} in {model}", "give its folder"
            )
        return load_head(model, load_config(model))
