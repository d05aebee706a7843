"""The prepared set: ids, masks and lengths of every sample, known before any state exists.

In: samples with their content-derived ids. Out: a folder with `samples.arrow` (Arrow IPC file, memory-mapped, ROWS rows
a batch) and `manifest.json`, whole or absent: the manifest is written last. Needs no torch and no tokenizer to read.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import PrepareError
from headrace.files import fsync_folder, write_json
from headrace.record import Sample, sample_id

FORMAT = "headrace-prepared"
VERSION = 0
SAMPLES = "samples.arrow"  # a set that has grown names another file in its manifest
ROWS = 1024  # rows of one batch; a row is found by division

SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary(16), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("heldout", pa.bool_(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, eq=False)
class Draft:
    """A sample on its way into a prepared set; its row is given when it is written."""

    id: bytes
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    source: str
    heldout: bool
    messages: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first trained one; all, if none is."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self.loss_mask)

    @property
    def prompt(self) -> bytes:
        """The ids before the first trained token, to be compared with other samples'."""
        return self.input_ids[: self.prompt_tokens].astype("<i4").tobytes()


class PreparedSet:
    """A prepared set opened for reading; lengths are in memory, ids and masks are mapped."""

    def __init__(self, folder: Path, manifest: dict[str, Any], reader: pa.ipc.RecordBatchFileReader) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint: str = manifest["fingerprint"]
        self._reader = reader
        self.lengths: npt.NDArray[np.int64] = self._column("num_tokens").astype(np.int64)
        self.prompt_tokens: npt.NDArray[np.int64] = self._column("prompt_tokens").astype(np.int64)
        self.trained_tokens: npt.NDArray[np.int64] = self._column("trained_tokens").astype(np.int64)
        self.heldout: npt.NDArray[np.bool_] = self._column("heldout").astype(bool)

    @classmethod
    def open(cls, folder: Path) -> "PreparedSet":
        """Open a folder that `write_prepared` made.

        Raises: PrepareError when it is absent, unfinished or of another version.
        """
        path = folder / "manifest.json"
        if not path.exists():
            raise PrepareError(
                "a prepared set", f"no {path}", "run `headrace prepare` (and `headrace regenerate`) first"
            )
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise PrepareError(
                f"{FORMAT} version {VERSION}", f"{manifest.get('format')} {manifest.get('version')}", "prepare again"
            )
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(folder / manifest.get("samples", SAMPLES))))
        except (OSError, pa.ArrowInvalid) as exc:
            raise PrepareError(f"{SAMPLES} beside the manifest", f"{folder}: {exc}", "prepare again") from exc
        opened = cls(folder, manifest, reader)
        if opened.num_samples != manifest["num_samples"]:
            raise PrepareError(f"{manifest['num_samples']} samples", str(opened.num_samples), "prepare again")
        return opened

    @property
    def num_samples(self) -> int:
        """N, held-out samples included."""
        return len(self.lengths)

    def sample(self, row: int) -> Sample:
        """One sample by its row. Raises: IndexError beyond the set, PrepareError where ids or mask were changed."""
        batch, place = self._place(row)
        input_ids, loss_mask = (batch.column(name)[place].values.to_numpy() for name in ("input_ids", "loss_mask"))
        own_id = batch.column("id")[place].as_py()
        if sample_id(input_ids, loss_mask) != own_id:
            raise PrepareError(
                f"the ids and mask that row {row} of {self.folder} was written with (id {own_id.hex()})",
                f"others (id {sample_id(input_ids, loss_mask).hex()})",
                "the file is damaged; prepare again",
            )
        return Sample(
            row=row,
            id=own_id,
            input_ids=input_ids,
            loss_mask=loss_mask,
            source=batch.column("source")[place].as_py(),
            heldout=bool(self.heldout[row]),
        )

    def sample_id(self, row: int) -> bytes:
        """The content-derived id of a row."""
        batch, place = self._place(row)
        found: bytes = batch.column("id")[place].as_py()
        return found

    def ids(self) -> list[bytes]:
        """The content-derived id of every row."""
        batches = (self._reader.get_batch(i).column("id") for i in range(self._reader.num_record_batches))
        return [own for batch in batches for own in batch.to_pylist()]

    def messages(self, row: int) -> list[dict[str, Any]]:
        """The chat a row was made from; empty for sets made from ids."""
        batch, place = self._place(row)
        text = batch.column("messages")[place].as_py()
        return json.loads(text) if text else []

    def sources(self) -> list[str]:
        """The source of each row."""
        return [str(name) for name in self._column("source")]

    def rows(self, source: str | None = None, heldout: bool | None = None) -> npt.NDArray[np.int64]:
        """Rows of one source, or of one side of the split, or of both; ascending int64. Raises: PrepareError for a
        source that is not there."""
        chosen = np.ones(self.num_samples, dtype=bool)
        if heldout is not None:
            chosen &= self.heldout == heldout
        if source is not None:
            names = np.array(self.sources(), dtype=object)
            if source not in names:
                raise PrepareError(f"a source among {sorted(set(names))}", source, "name one of them")
            chosen &= names == source
        return np.flatnonzero(chosen).astype(np.int64)

    def trained_counts(self, num_ids: int, *, heldout: bool = False) -> npt.NDArray[np.int64]:
        """How often each id is a trained token of training rows, or of held-out ones: int64 [num_ids].

        Raises: PrepareError for an id beyond `num_ids`.
        """
        counts, row = np.zeros(num_ids, dtype=np.int64), 0
        for number in range(self._reader.num_record_batches):
            batch = self._reader.get_batch(number)
            chosen = np.repeat(self.heldout[row : row + len(batch)] == heldout, self.lengths[row : row + len(batch)])
            ids, mask = (batch.column(name).flatten().to_numpy() for name in ("input_ids", "loss_mask"))
            found = np.bincount(ids[chosen & mask.astype(bool)], minlength=num_ids)
            if len(found) > num_ids:
                raise PrepareError(f"ids below {num_ids}", str(len(found) - 1), "prepare with this target's tokenizer")
            counts, row = counts + found, row + len(batch)
        return counts

    def draft(self, row: int) -> Draft:
        """A row as it was written. Raises: as `sample` does."""
        sample, (batch, place) = self.sample(row), self._place(row)
        text = batch.column("messages")[place].as_py()
        return Draft(sample.id, sample.input_ids, sample.loss_mask, sample.source, sample.heldout, text)

    def _place(self, row: int) -> tuple[pa.RecordBatch, int]:
        if not 0 <= row < self.num_samples:
            raise IndexError(f"row {row} of {self.num_samples}")
        return self._reader.get_batch(row // ROWS), row % ROWS

    def _column(self, name: str) -> npt.NDArray[Any]:
        batches = [self._reader.get_batch(i).column(name) for i in range(self._reader.num_record_batches)]
        return np.concatenate([b.to_numpy(zero_copy_only=False) for b in batches]) if batches else np.zeros(0)


def drafts_of(prepared: "PreparedSet", rows: Iterable[int]) -> Iterator[Draft]:
    """Some rows of a prepared set as drafts of another one; without their chats."""
    for row in rows:
        s = prepared.sample(row)
        yield Draft(s.id, s.input_ids, s.loss_mask, s.source, s.heldout)


def write_prepared(folder: Path, drafts: Iterable[Draft], manifest: Mapping[str, Any]) -> int:
    """Write a prepared set; `manifest.json` last, so that a folder with one is whole.

    Args: manifest: everything but format, version, num_samples and num_heldout; `samples` names the file of samples,
        if not samples.arrow.
    Returns: number of samples written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = str(manifest.get("samples", SAMPLES))
    temporary = folder / f"{name}.tmp"
    num_samples = num_heldout = 0
    with pa.OSFile(str(temporary), "wb") as out, pa.ipc.new_file(out, SCHEMA) as writer:
        pending: list[Draft] = []
        for draft in drafts:
            pending.append(draft)
            num_heldout += draft.heldout
            if len(pending) == ROWS:
                writer.write_batch(_batch(pending))
                num_samples += len(pending)
                pending = []
        if pending:
            writer.write_batch(_batch(pending))
            num_samples += len(pending)
    _fsync(temporary)
    temporary.replace(folder / name)
    fsync_folder(folder)
    head = {"format": FORMAT, "version": VERSION, "num_samples": num_samples, "num_heldout": num_heldout}
    write_json(folder / "manifest.json", {**head, **manifest})
    return num_samples


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _batch(drafts: list[Draft]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([d.id for d in drafts], pa.binary(16)),
            pa.array([d.input_ids for d in drafts], pa.list_(pa.int32())),
            pa.array([d.loss_mask for d in drafts], pa.list_(pa.uint8())),
            pa.array([d.source for d in drafts], pa.string()),
            pa.array([d.heldout for d in drafts], pa.bool_()),
            pa.array([len(d.input_ids) for d in drafts], pa.int32()),
            pa.array([d.prompt_tokens for d in drafts], pa.int32()),
            pa.array([int(d.loss_mask.sum()) for d in drafts], pa.int32()),
            pa.array([d.messages for d in drafts], pa.string()),
        ],
        schema=SCHEMA,
    )
