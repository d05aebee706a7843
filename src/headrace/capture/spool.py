"""States that came with the answers, until a capture has taken them.

In: `answers/states`, a store whose rows are those of the prompts and whose samples are prompt and answer as ids; and
samples of the prepared set. Out: the record of a sample, found by its id alone, in the codec that the capture writes. A
sample that is not there, was changed since, or is damaged gives none: the capture asks for it.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from headrace.codec.base import record_states
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFolder
from headrace.errors import StoreError
from headrace.record import Record, Sample, make_record
from headrace.store.lock import StoreLock
from headrace.store.manifest import FILE_NAME, Manifest
from headrace.store.reader import StoreReader
from headrace.token_rule import TokenRule


class Encoder(Protocol):
    """What makes records of checked states (headrace.capture.capture.GroupEncoder)."""

    rule: TokenRule

    @property
    def record(self) -> Callable[[Sample, torch.Tensor, int, int], Record]:
        """A record of a sample's states from some token on, of a generation."""
        ...


def spool_root(folder: RunFolder) -> Path:
    """The folder of a run's states that came with the answers."""
    return folder.answers / "states"


class Spool:
    """Those states, opened for one capture; `num_damaged` counts samples that could not be taken."""

    def __init__(self, reader: StoreReader, wanted: CodecSpec) -> None:
        """Args: wanted: the codec of the capture; the spool has it, or is raw."""
        self.num_damaged = 0
        self._reader = reader
        held = reader.manifest.codec
        self._raw = None if held.to_json() == wanted.to_json() else open_codec(held)
        entries = reader.entries()
        self._rows = {bytes(id): int(row) for id, row in zip(entries["id"], entries["row"], strict=True)}

    @classmethod
    def open(cls, folder: RunFolder, wanted: Manifest) -> "Spool | None":
        """The spool of a run; None where it has none.

        Args: wanted: of the capture.
        Raises: StoreError for states of another identity, naming the field, and for a damaged manifest or journal.
        """
        root = spool_root(folder)
        if not (root / FILE_NAME).is_file():
            return None
        found = Manifest.read(root)
        codec = found.codec if found.codec.name == "raw" else wanted.codec
        found.compare(replace(wanted, prepared=found.prepared, codec=codec), f"{root} (remove it to capture them anew)")
        return cls(StoreReader(root), wanted.codec)

    def take(self, sample: Sample, encoder: Encoder, generation: int) -> Record | None:
        """The record of a sample of the prepared set; None where its states are not here, or not whole."""
        row = self._rows.get(sample.id)
        if row is None:
            return None
        try:
            found = self._reader.read(row, sample.id)
        except StoreError:
            self.num_damaged += 1
            return None
        first = found.segments[0].token_start
        if (first, first + found.num_tokens) != encoder.rule.span(sample.loss_mask):
            self.num_damaged += 1
            return None
        if self._raw is not None:
            return encoder.record(sample, record_states(found, self._raw), generation, first)
        spans = [(one.token_start, one.token_start + one.num_tokens) for one in found.segments]
        return make_record(sample, spans, [one.payload for one in found.segments], generation)


def remove_spool(folder: RunFolder) -> None:
    """Remove what was taken; left alone while answers are being written there."""
    root = spool_root(folder)
    taken = root.with_name("states.taken")  # a kill leaves no half of a store under the name of a whole one
    shutil.rmtree(taken, ignore_errors=True)
    if root.is_dir():
        with suppress(StoreError):
            lock = StoreLock(root)
            root.rename(taken)
            lock.release()
            shutil.rmtree(taken, ignore_errors=True)
