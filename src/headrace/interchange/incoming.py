"""Another program's states on their way into a run folder.

In: an opened peer's folder, and what its user says of it. Out: a prepared set and raw states, checked as a capture
checks them; a killed import goes on. Samples that occur twice are taken once; what is not finite is a failure with a
reason. The files name no target, so its folder gives the identity; their dtype is taken for the target's.
"""

import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.capture.capture import store_sizes
from headrace.capture.check import check_states
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError, PrepareError
from headrace.files import Stage
from headrace.interchange.slots import said_final, said_taps
from headrace.prepare.build import held_out
from headrace.prepare.model_files import load_config, load_tokenizer
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.prepare.template import template_hash, tokenizer_hash
from headrace.progress import Progress
from headrace.record import digest, make_record, sample_id, segment_spans
from headrace.store.manifest import Manifest, make_manifest
from headrace.store.writer import StoreWriter
from headrace.taps import Tap
from headrace.target.quantised import read_quantisation
from headrace.target.weights import weights_hash

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Look = TypeVar("Look", bound=Hashable)


class Peer(Protocol):
    """A peer's folder, opened and looked through: every sample is there and of one shape.

    `num_slots` taps a token, besides a last state where `has_final`; `listed` their numbers, if the files have them.
    """

    kind: str
    num_slots: int
    has_final: bool
    hidden_size: int
    dtype: str
    listed: tuple[int, ...] | None

    def __len__(self) -> int: ...

    def where(self, number: int) -> str:
        """What to call a sample in a message."""
        ...

    def sample(self, number: int) -> tuple[Ids, Mask]:
        """Ids and mask."""
        ...

    def states(self, number: int) -> torch.Tensor:
        """[T, slots, H], a last state as the last slot."""
        ...


def look_through(count: int, look: Callable[[int], Look], progress: Progress) -> set[Look]:
    """What `look` finds of every sample, each finding once."""
    progress.start("look through", count, "samples")
    found = set()
    for number in range(count):
        found.add(look(number))
        progress.advance(number + 1)
    progress.end()
    return found


@dataclass(frozen=True)
class Said:
    """What a user says of a peer's files: the target's folder, the taps and the last state (see `slots`)."""

    target: Path
    taps: str | None
    final: str | None = None
    heldout_fraction: float = RunFile().prepare.heldout_fraction


def take_in(peer: Peer, said: Said, to: RunFolder, progress: Progress) -> dict[str, Any]:
    """Write a peer's samples as a prepared set and states.

    Returns: num_samples, num_duplicates, taps, and the sizes that a capture tells.
    Raises: ConfigError for what was not said, or does not fit the target, or another import in the folder.
    """
    config = load_config(said.target).get_text_config()
    if config.hidden_size != peer.hidden_size:
        raise ConfigError(f"states of width {config.hidden_size}", str(peer.hidden_size), "give their own --target")
    taps = said_taps(said.taps, peer.num_slots, config.num_hidden_layers, peer.listed)
    final = said_final(said.final, peer.has_final)
    if final is not None and final in taps:
        raise ConfigError("each tap once", f"{final} as a slot and as --final", "say --final drop")
    taps = taps if final is None else (*taps, final)
    target = _target(said.target, config, peer.dtype)
    numbers = _prepare(peer, said, target, to, progress)
    prepared = PreparedSet.open(to.prepared)
    spec = CodecSpec("raw", 0, len(taps), peer.hidden_size, peer.dtype)
    told = {"imported_from": peer.kind}
    manifest = make_manifest(target, [str(tap) for tap in taps], spec, prepared.fingerprint, told)
    stage = Stage(to.states, "import", {"from": peer.kind, **manifest.identity()})
    if stage.state() == "done":
        progress.note("import: done before, kept")
        return stage.summary()
    stage.begin()
    drop = peer.has_final and final is None
    written = _write(_Work(peer, numbers, prepared, taps, drop, manifest), to, progress)
    summary = {
        "num_samples": prepared.num_samples,
        "num_duplicates": len(peer) - len(numbers),
        **written,
        "taps": list(manifest.taps),
    }
    stage.finish(summary)
    return summary


@dataclass(frozen=True)
class _Work:
    """One import: `numbers` are the peer's numbers of the rows."""

    peer: Peer
    numbers: list[int]
    prepared: PreparedSet
    taps: tuple[Tap, ...]
    drop_final: bool
    manifest: Manifest


def _write(work: _Work, to: RunFolder, progress: Progress) -> dict[str, int]:
    spec, store = work.manifest.codec, RunFile().store
    codec = open_codec(spec)
    with StoreWriter(to.states, work.manifest, store.shard_bytes, store.shard_seconds) as writer:
        missing = [row for row in range(len(work.numbers)) if row not in writer.committed and row not in writer.failed]
        progress.start("import", len(work.numbers), "samples", len(work.numbers) - len(missing))
        for done, row in enumerate(missing, len(work.numbers) - len(missing) + 1):
            sample = work.prepared.sample(row)
            states_TLH = work.peer.states(work.numbers[row])
            states_TLH = states_TLH[:, :-1] if work.drop_final else states_TLH
            wrong = check_states(states_TLH, sample.input_ids, work.taps, spec.hidden_size)
            if wrong is not None:
                reason = f"{work.peer.where(work.numbers[row])}: {wrong}"
                writer.fail(sample.id, row, reason, permanent=True)
                progress.note(f"row {row} failed: {reason}")
            else:
                spans = segment_spans(sample.num_tokens, spec.bytes_per_token())
                payloads = [codec.encode(states_TLH[start:end]) for start, end in spans]
                writer.add(make_record(sample, spans, payloads, writer.generation))
            progress.advance(done)
        progress.end()
        writer.seal()
    return store_sizes(to, work.prepared, codec)


def _target(folder: Path, config: Any, dtype: str) -> dict[str, Any]:
    """The identity that a target's own folder gives."""
    tokenizer = load_tokenizer(folder)
    return {
        "model": str(folder),
        "architecture": (load_config(folder).architectures or [type(config).__name__])[0],
        "num_blocks": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "dtype": dtype,
        "quantisation": read_quantisation(folder).identity,
        "weights_hash": weights_hash(folder),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer.chat_template or ""),
        "engine": "unknown",
        "engine_version": "unknown",
    }


def _prepare(peer: Peer, said: Said, target: dict[str, Any], to: RunFolder, progress: Progress) -> list[int]:
    """Write the prepared set unless it is there. Returns: the peer's number of each row."""
    numbers: list[int] = []
    ids: list[bytes] = []
    seen: set[bytes] = set()
    progress.start("ids and masks", len(peer), "samples")
    for number in range(len(peer)):
        progress.advance(number)
        input_ids, loss_mask = peer.sample(number)
        _check_sample(input_ids, loss_mask, target["vocab_size"], peer.where(number))
        own = sample_id(input_ids, loss_mask)
        if own not in seen:
            seen.add(own)
            ids.append(own)
            numbers.append(number)
    progress.end()
    if not numbers:
        raise PrepareError("at least one sample", f"none from {peer.kind}", "check the folder")
    identity = {
        "from": peer.kind,
        "ids": digest(*ids).hex(),
        "tokenizer": target["tokenizer_hash"],
        "template": target["template_hash"],
        "heldout_fraction": said.heldout_fraction,
    }
    stage = Stage(to.prepared, "import", identity)
    if stage.state() == "done":
        return numbers
    stage.begin()

    def drafts() -> Iterator[Draft]:
        for number, own in zip(numbers, ids, strict=True):
            draft = Draft(own, *peer.sample(number), source=peer.kind, heldout=False)
            yield Draft(own, draft.input_ids, draft.loss_mask, peer.kind, held_out(draft, said.heldout_fraction))

    count = len(peer) - len(numbers)
    if count:
        progress.note(f"import: {count} samples occur twice and are taken once")
    write_prepared(
        to.prepared,
        drafts(),
        {
            "fingerprint": digest(json.dumps(identity, sort_keys=True).encode()).hex(),
            "tokenizer_hash": target["tokenizer_hash"],
            "template_hash": target["template_hash"],
            "identity": identity,
            "counts": {"num_duplicates": count},
        },
    )
    stage.finish({"num_samples": len(numbers)})
    return numbers


def _check_sample(input_ids: Ids, loss_mask: Mask, vocab_size: int, where: str) -> None:
    if len(input_ids) == 0 or len(input_ids) != len(loss_mask):
        found = f"{len(input_ids)} ids and {len(loss_mask)} of the mask in {where}"
        raise PrepareError("as many ids as mask, at least one", found, "mend the file, or take it out")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        found = f"{int(input_ids.min())} to {int(input_ids.max())} in {where}"
        raise PrepareError(f"ids from 0 to {vocab_size - 1}, as the target has", found, "give the states' own --target")
    if int(loss_mask.max()) > 1:
        raise PrepareError("a loss mask of 0 and 1", f"{int(loss_mask.max())} in {where}", "mend the file")
