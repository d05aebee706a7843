"""The target's hidden states of the whole prepared set, checked, encoded and stored.

In: a prepared set and a target. Out: the states folder, one record a row, held-out rows included. Work goes by capture
group, whose members and padding are fixed: a missing record is made again with its whole group, so its bits are those
of an undisturbed run. What fails its check twice is a failure with a reason, never a record.
"""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headrace.capture.check import check_states
from headrace.capture.growth import adopt_growth
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.codec.drift import Drift
from headrace.codec.registry import chosen_spec, copy_basis, open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError
from headrace.files import Stage
from headrace.order import CaptureGroup, capture_groups
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Record, Sample, make_record, segment_spans
from headrace.store.budget import StoreFull, check_room, expected_bytes
from headrace.store.manifest import Manifest, make_manifest
from headrace.store.queue import RecordQueue
from headrace.store.reader import StoreReader
from headrace.store.writer import StoreWriter
from headrace.taps import FINAL_PRE_NORM, Tap, default_taps, parse_taps
from headrace.target.base import Target


def capture(cfg: RunFile, folder: RunFolder, target: Target, progress: Progress) -> dict[str, Any]:
    """Capture every row that the store does not hold yet.

    Returns: num_records, num_tokens, num_trained, bytes_raw, bytes_stored, num_failed, seconds, tokens_s (of this
    process), taps.
    Raises: CaptureError when more samples fail than capture.tolerate_failures; ConfigError or StoreError when the
    folder holds states of another identity.
    """
    prepared = PreparedSet.open(folder.prepared)
    taps = capture_taps(cfg, target.spec.num_blocks)
    spec, fitted = chosen_spec(cfg.capture.codec, len(taps), target.spec.hidden_size, cfg.states_dtype)
    _check_final(spec, taps)
    codec = open_codec(spec, fitted)
    manifest = _manifest(cfg, target, taps, codec, prepared)
    if grown := adopt_growth(folder.states, prepared):
        progress.note(f"states: {grown}")
    stage = Stage(folder.states, "capture", _identity(cfg, manifest))
    known = stage.state()
    if known == "new":
        stage.begin()
    own = cfg.store
    with StoreWriter(folder.states, manifest, own.shard_bytes, own.shard_seconds, max_bytes=own.max_bytes) as writer:
        copy_basis(spec, fitted, folder.states)  # beside a manifest that was found to name it
        for note in writer.notes:
            progress.note(f"states: {note}")
        work = _Capture(cfg, prepared, target, taps, codec, writer, progress, drift=Drift.of(codec))
        groups = work.missing_groups()
        if known == "done" and not groups:
            progress.note("states: captured before, kept")
            return stage.summary()
        work.check_room()
        try:
            with RecordQueue(writer, own.queue_bytes) as work.queue:
                speed = work.run(groups)
        except StoreFull as exc:
            writer.seal()
            raise work.stopped(exc) from exc
    drift = {} if work.drift is None else {"drift": work.drift.summary()}
    if work.drift is not None and (told := work.drift.note()) is not None:
        progress.note(f"drift: {told}")
    summary = {**store_sizes(folder, prepared, codec), **speed, **drift, "taps": [str(tap) for tap in taps]}
    stage.finish(summary)
    return summary


def _check_final(spec: CodecSpec, taps: Sequence[Tap]) -> None:
    if taps[-1] == FINAL_PRE_NORM and not spec.of_taps:
        raise CaptureError(
            "raw, lossless or fp8 for a last state, which the loss reads as it is",
            f"capture.codec {spec.name} with capture.final_state",
            "change one of the two",
        )


def capture_taps(cfg: RunFile, num_blocks: int) -> tuple[Tap, ...]:
    """The taps of a run: those named in the run file, or the default rule; then the last state, if it is asked for.

    Raises: ConfigError as parse_taps does.
    """
    named = cfg.target.taps
    taps = parse_taps(named, num_blocks) if named is not None else default_taps(num_blocks, cfg.target.num_taps)
    if not cfg.capture.final_state or FINAL_PRE_NORM in taps:
        return taps
    return (*taps, FINAL_PRE_NORM)


@dataclass
class _Capture:
    """One process's work on a store."""

    cfg: RunFile
    prepared: PreparedSet
    target: Target
    taps: tuple[Tap, ...]
    codec: Codec
    writer: StoreWriter
    progress: Progress
    queue: RecordQueue | None = None
    drift: Drift | None = None

    def check_room(self) -> None:
        """Refuse, before the first forward pass, what will not fit. Raises: StoreFull."""
        lengths = self.prepared.lengths[self._missing_rows()]
        expected = expected_bytes(lengths.tolist(), self.codec.spec.bytes_per_token())
        check_room(self.writer.root, self.writer.num_bytes, expected, self.cfg.store.max_bytes)

    def stopped(self, error: StoreFull) -> StoreFull:
        """The same error, with what is missing from the store as it is now."""
        rows = self._missing_rows()
        lengths = self.prepared.lengths[rows].tolist()
        more = expected_bytes(lengths, self.codec.spec.bytes_per_token())
        missing = f"{len(rows)} of {self.prepared.num_samples} samples are missing"
        found = f"{error.args[1]}; {missing}: {sum(lengths):,} tokens, about {more:,} bytes"
        return StoreFull(error.args[0], found, error.args[2])

    def _missing_rows(self) -> list[int]:
        return [row for row in range(self.prepared.num_samples) if self._missing(row)]

    def missing_groups(self) -> list[CaptureGroup]:
        """Groups with a row that is neither stored nor failed for good."""
        lengths = np.asarray(self.prepared.lengths, dtype=np.int64)
        groups = capture_groups(lengths, self.cfg.order.window_samples, self.cfg.capture.group_tokens)
        return [group for group in groups if any(self._missing(row) for row in group.rows)]

    def _missing(self, row: int) -> bool:
        if row in self.writer.committed:
            return False
        return row not in self.writer.failed or not self.writer.failed[row].permanent

    def run(self, groups: Sequence[CaptureGroup]) -> dict[str, float]:
        """Capture groups in order. Returns: seconds and tokens_s, tokens that were run, not those that were stored."""
        lengths = self.prepared.lengths
        done, run_tokens, num_bytes = int(lengths.sum() - lengths[self._missing_rows()].sum()), 0, 0
        self.progress.start("capture", int(lengths.sum()), "tokens", done)
        started = time.monotonic()
        self._stop_if_too_many()
        for group in groups:
            records = self._group(group)
            assert self.queue is not None
            for record in records:
                self.queue.add(record)
            rows = list(group.rows)
            run_tokens += int(lengths[rows].sum())
            done += sum(record.num_tokens for record in records)
            num_bytes += sum(record.num_bytes for record in records)
            seconds = max(time.monotonic() - started, 1e-9)
            self.progress.advance(done, tokens_s=run_tokens / seconds, MB=num_bytes / 1e6)
        if self.queue is not None:
            self.queue.flush()
        self.progress.end()
        seconds = max(time.monotonic() - started, 1e-9)
        return {"seconds": round(seconds, 3), "tokens_s": round(run_tokens / seconds, 1)}

    def _group(self, group: CaptureGroup) -> list[Record]:
        """Records of the group's missing rows that pass their check; the others become failures."""
        samples = [self.prepared.sample(row) for row in group.rows]
        wrong: dict[int, str] = {}
        for _ in range(2):  # a fault that a second pass does not show was the machine's, not the sample's
            states = self._states(samples, group.padded_tokens)
            wrong = self._faults(samples, states)
            if not wrong:
                break
        missing = [(s, own) for s, own in zip(samples, states, strict=True) if self._missing(s.row)]
        for sample, _ in missing:
            if sample.row in wrong:
                self._fail(sample, wrong[sample.row])
        return [self._record(sample, own) for sample, own in missing if sample.row not in wrong]

    def _states(self, samples: Sequence[Sample], padded_tokens: int) -> list[torch.Tensor]:
        states = self.target.states([s.input_ids for s in samples], self.taps, padded_tokens)
        if len(states) != len(samples):
            raise CaptureError(f"states of {len(samples)} samples", str(len(states)), "the target's adapter is broken")
        dtype = TORCH_DTYPES[self.codec.spec.dtype]  # rounded before they are checked: float16 may overflow
        return [own.to(dtype) for own in states]

    def _faults(self, samples: Sequence[Sample], states: Sequence[torch.Tensor]) -> dict[int, str]:
        hidden_size = self.target.spec.hidden_size
        found = {
            s.row: check_states(own, s.input_ids, self.taps, hidden_size)
            for s, own in zip(samples, states, strict=True)
            if self._missing(s.row)
        }
        return {row: reason for row, reason in found.items() if reason is not None}

    def _record(self, sample: Sample, states_TLH: torch.Tensor) -> Record:
        spans = segment_spans(sample.num_tokens, self.codec.spec.bytes_per_token())
        payloads = [self.codec.encode(states_TLH[start:end]) for start, end in spans]
        if self.drift is not None:
            self.drift.see(sample.row, sample.source, states_TLH)
        return make_record(sample, spans, payloads, self.writer.generation)

    def _fail(self, sample: Sample, reason: str) -> None:
        self.writer.fail(sample.id, sample.row, reason, permanent=True)
        self.progress.note(f"row {sample.row} failed: {reason}")
        self._stop_if_too_many()

    def _stop_if_too_many(self) -> None:
        failed = [f for row, f in self.writer.failed.items() if row not in self.writer.committed]
        tolerated = self.cfg.capture.tolerate_failures * self.prepared.num_samples
        if len(failed) > tolerated:
            last = failed[-1]
            raise CaptureError(
                f"at most {self.cfg.capture.tolerate_failures:.1%} of {self.prepared.num_samples} samples to fail",
                f"{len(failed)}, the last one row {last.row}: {last.reason}",
                "mend the target; or raise capture.tolerate_failures and go on",
            )


def _manifest(cfg: RunFile, target: Target, taps: Sequence[Tap], codec: Codec, prepared: PreparedSet) -> Manifest:
    told = {
        "group_tokens": cfg.capture.group_tokens,
        "window_samples": cfg.order.window_samples,
        "threads": torch.get_num_threads(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }
    return make_manifest(asdict(target.spec), [str(tap) for tap in taps], codec.spec, prepared.fingerprint, told)


def _identity(cfg: RunFile, manifest: Manifest) -> dict[str, Any]:
    """The manifest's identity with each field of the target on its own, and what fixes the members of groups."""
    identity = manifest.identity()
    target = {f"target {key}": value for key, value in identity.pop("target").items()}
    groups = {"capture.group_tokens": cfg.capture.group_tokens, "order.window_samples": cfg.order.window_samples}
    return {**target, **identity, **groups}


def store_sizes(folder: RunFolder, prepared: PreparedSet, codec: Codec) -> dict[str, int]:
    """What the store holds, as a reader sees it."""
    reader = StoreReader(folder.states)
    raw = CodecSpec("raw", 0, codec.spec.num_taps, codec.spec.hidden_size, codec.spec.dtype)
    sizes = {
        "num_records": reader.num_records,
        "num_failed": prepared.num_samples - reader.num_records,
        "num_tokens": reader.num_tokens,
        "num_trained": reader.num_trained,
        "bytes_raw": int(reader.num_tokens * raw.bytes_per_token()),
        "bytes_stored": reader.stored_bytes,
    }
    reader.close()
    return sizes
