"""A run with a tiny target, and what its readers and its folder give."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.capture.capture import capture
from headrace.config import RunFile, RunFolder
from headrace.order import epoch_order
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Silent
from headrace.source import Hole, Position
from headrace.store.reader import DamagedRecord, StoredRecord, StoreReader
from headrace.store.shard import shard_name
from headrace.stream.fill import FillSupply
from headrace.stream.supply import Item
from headrace.target.transformers_target import load_target
from headrace.testing.tiny_target import save_tiny_target
from tests.capture.conftest import make_cfg, write_set

LENGTHS = tuple(2 + (7 * n) % 15 for n in range(36))
WAIT_S = 60.0


class Notes(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


def tiny_target(folder: Path, broken_ids: Sequence[int] = ()) -> Path:
    """A tiny target; tokens of `broken_ids` have an embedding that is not a number."""
    save_tiny_target(folder, "qwen3")
    if broken_ids:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.embed_tokens.weight"][list(broken_ids)] = float("nan")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def new_run(tiny: Path, root: Path, lengths: Sequence[int] = LENGTHS, **serve: Any) -> tuple[RunFile, RunFolder]:
    """A run with a prepared set; `serve` replaces settings of that section, unchecked (a tiny ring)."""
    cfg = make_cfg(tiny, root)
    folder = RunFolder(Path(cfg.run))
    write_set(folder.prepared, lengths, trained=True)
    return cfg.model_copy(update={"serve": cfg.serve.model_copy(update=serve)}), folder


def positions(cfg: RunFile, folder: RunFolder, epoch: int) -> list[Position]:
    prepared = PreparedSet.open(folder.prepared)
    rows = epoch_order(~prepared.heldout, cfg.order.window_samples, cfg.order.seed, epoch).tolist()
    return [Position(epoch, place, row, prepared.sample_id(row)) for place, row in enumerate(rows)]


def heldout_positions(folder: RunFolder) -> list[Position]:
    prepared = PreparedSet.open(folder.prepared)
    return [Position(0, -1, row, prepared.sample_id(row)) for row in np.flatnonzero(prepared.heldout).tolist()]


def read(supply: FillSupply, wanted: Sequence[Position], at_once: int = 5, max_bytes: int = 10**6) -> list[Any]:
    """Items of all positions, asked for in small requests."""
    found: list[Item] = []
    while len(found) < len(wanted):
        items = supply.take(wanted[len(found) : len(found) + at_once], max_bytes, WAIT_S)
        assert items, f"nothing for {wanted[len(found)]}"
        found.extend(_whole(supply, wanted[len(found) :], items))
    return found


def _whole(supply: FillSupply, asked: Sequence[Position], items: list[Item]) -> list[Item]:
    """What of them can be read; as a server does, the supply is told of what cannot, and asked again."""
    whole: list[Item] = []
    for position, item in zip(asked, items, strict=False):
        try:
            whole.append(item.record() if isinstance(item, StoredRecord) else item)
        except DamagedRecord as exc:
            supply.damaged(position, exc)
            break
    return whole


def content(item: Item) -> tuple[Any, ...]:
    """What must be equal however a record came: everything but its generation."""
    if isinstance(item, StoredRecord):
        item = item.record()
    if isinstance(item, Hole):
        return item.row, item.id, "hole"
    spans = tuple((segment.token_start, segment.num_tokens) for segment in item.segments)
    payload = b"".join(bytes(segment.payload) for segment in item.segments)
    return item.row, item.id, spans, item.input_ids.tobytes(), item.loss_mask.tobytes(), payload


def offline(cfg: RunFile, folder: RunFolder, into: Path) -> dict[int, tuple[Any, ...]]:
    """Content of every row, captured offline into another run folder."""
    torch.set_num_threads(1)
    own = RunFolder(into)
    lengths = PreparedSet.open(folder.prepared).lengths.tolist()
    write_set(own.prepared, lengths, trained=True)
    capture(cfg.model_copy(update={"run": str(into)}), own, load_target(cfg.target), Silent())
    reader = StoreReader(own.states)
    found = {row: content(reader.read(row, reader.id_of(row))) for row in reader.rows.tolist()}
    reader.close()
    return found


def spoil(states: Path, row: int, segment: int = 0) -> None:
    """Flip one byte in a segment of a row's newest record."""
    reader = StoreReader(states)
    entries = reader.entries()
    place = entries[int(np.flatnonzero(entries["row"] == row)[segment])]
    reader.close()
    path = states / "shards" / shard_name(int(place["shard_generation"]), int(place["shard_number"]))
    content = bytearray(path.read_bytes())
    content[int(place["offset"]) + int(place["length"]) - 30] ^= 1
    path.write_bytes(content)
