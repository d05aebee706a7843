"""A tiny run, prepared and captured without a model's forward pass: random ids, random states, a random target."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.codec.base import RawCodec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.record import Record, Sample, make_record, sample_id
from headrace.source import Hole, Position
from headrace.store.manifest import make_manifest
from headrace.store.writer import StoreWriter
from headrace.target.base import TargetSpec
from headrace.target.weights import weights_hash
from headrace.testing.tiny_target import HIDDEN_SIZE, NUM_BLOCKS, VOCAB_SIZE

TAPS = ["after_block:1", "after_block:3"]
CODEC = RawCodec(CodecSpec("raw", 0, len(TAPS), HIDDEN_SIZE, "float32"))
MASK_TOKEN_ID = 63
TRAIN: dict[str, Any] = {
    "epochs": 2,
    "step_tokens": 48,
    "micro_tokens": 24,
    "anchors": 4,
    "autocast": False,
    "threads": 1,
    "eval_every": 4,
    "eval_samples": 2,
    "read_ahead": 4,
    "tensorboard": False,
}


def drafts(num_samples: int, num_heldout: int, seed: int = 0) -> Iterator[Draft]:
    """Samples of 10 to 18 tokens, a prompt of 4; the last `num_heldout` are held out."""
    rng = np.random.default_rng(seed)
    for row in range(num_samples):
        ids = rng.integers(3, VOCAB_SIZE - 1, int(rng.integers(10, 19))).astype(np.int32)
        mask = (np.arange(len(ids)) >= 4).astype(np.uint8)
        yield Draft(sample_id(ids, mask), ids, mask, "noise", row >= num_samples - num_heldout)


def states_of(sample: Sample) -> torch.Tensor:
    """Random states [T, L, H] that depend on the sample alone; the second tap has ten times the norm."""
    generator = torch.Generator().manual_seed(int.from_bytes(sample.id[:6], "little"))
    states = torch.randn(sample.num_tokens, len(TAPS), HIDDEN_SIZE, generator=generator)
    return states * torch.tensor([1.0, 10.0])[:, None]


def record_of(sample: Sample, states_TLH: torch.Tensor | None = None, generation: int = 1) -> Record:
    """A record in two segments."""
    states = states_of(sample) if states_TLH is None else states_TLH
    spans = [(0, 5), (5, sample.num_tokens)]
    return make_record(sample, spans, [CODEC.encode(states[a:b]) for a, b in spans], generation)


def write_set(folder: Path, samples: Iterable[Draft], fingerprint: str = "noise-1") -> PreparedSet:
    write_prepared(folder, samples, {"fingerprint": fingerprint})
    return PreparedSet.open(folder)


def write_states(
    folder: Path, prepared: PreparedSet, target: Path, changed: Mapping[int, torch.Tensor | None] | None = None
) -> None:
    """A store of every row's states; of `changed` rows other states, or none: a permanent failure."""
    spec = TargetSpec(
        model=str(target),
        architecture="LlamaForCausalLM",
        num_blocks=NUM_BLOCKS,
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        quantisation="none",
        weights_hash=weights_hash(target),
        tokenizer_hash="t",
        template_hash="t",
        engine="fake",
        engine_version="0",
    )
    manifest = make_manifest(dataclasses.asdict(spec), TAPS, CODEC.spec, prepared.fingerprint, {})
    with StoreWriter(folder, manifest, shard_bytes=1 << 20, shard_seconds=60.0) as writer:
        for row in range(prepared.num_samples):
            sample = prepared.sample(row)
            if changed is not None and row in changed:
                states = changed[row]
                if states is None:
                    writer.fail(sample.id, row, "too long for the engine", permanent=True)
                    continue
                writer.add(record_of(sample, states, writer.generation))
            else:
                writer.add(record_of(sample, None, writer.generation))


def run_file(root: Path, target: Path, **train: Any) -> RunFile:
    """Settings of a tiny run in `root`."""
    return RunFile.model_validate(
        {
            "run": str(root),
            "target": {"model": str(target), "dtype": "float32", "device": "cpu", "taps": TAPS},
            "order": {"window_samples": 4},
            "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": MASK_TOKEN_ID},
            "train": {**TRAIN, **train},
        }
    )


def make_run(
    root: Path,
    target: Path,
    num_samples: int = 14,
    num_heldout: int = 2,
    changed: Mapping[int, torch.Tensor | None] | None = None,
) -> RunFolder:
    """Prepared set and states of a run."""
    folder = RunFolder(root)
    prepared = write_set(folder.prepared, drafts(num_samples, num_heldout))
    write_states(folder.states, prepared, target, changed)
    return folder


class ListSource:
    """A source in memory that remembers which rows were asked for."""

    def __init__(self, prepared: PreparedSet, holes: Iterable[int] = ()) -> None:
        self.prepared = prepared
        self.asked: list[int] = []
        self._holes = {row: Hole(row, prepared.sample_id(row), "no states") for row in holes}

    def manifest(self) -> Mapping[str, Any]:
        return {}

    def records(self, positions: Iterable[Position]) -> Iterator[Record | Hole]:
        for position in positions:
            self.asked.append(position.row)
            hole = self._holes.get(position.row)
            yield hole if hole is not None else record_of(self.prepared.sample(position.row))

    def holes(self) -> Mapping[int, Hole]:
        return self._holes

    def commit(self, position: Position) -> None:
        pass

    def close(self) -> None:
        pass
