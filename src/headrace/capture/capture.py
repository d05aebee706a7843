"""The target's hidden states of the whole prepared set, checked, encoded and stored.

In: a prepared set and a target. Out: the states folder, one record a row, held-out rows included. Work goes by capture
group, whose members and padding are fixed: a missing record is made again with its whole group, so its bits are those
of an undisturbed run. What fails its check twice is a failure with a reason, never a record.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.capture.check import check_states
from headrace.capture.engines import EngineCapture, Refused
from headrace.capture.fleet import Fleet
from headrace.capture.fleet_actor import hardware
from headrace.capture.growth import adopt_growth
from headrace.capture.probe import kept_probe
from headrace.capture.spool import Spool, remove_spool
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.codec.drift import Drift
from headrace.codec.registry import chosen_spec, copy_basis, open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, ConfigError
from headrace.files import Stage
from headrace.order import CaptureGroup, capture_groups
from headrace.prepare.grow import chain
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Record, Sample, make_record, segment_spans
from headrace.store.budget import StoreFull, check_room, expected_bytes
from headrace.store.manifest import Manifest, make_manifest
from headrace.store.queue import RecordQueue
from headrace.store.reader import StoreReader
from headrace.store.remote_writer import open_writer
from headrace.store.writer import StoreWriter
from headrace.taps import FINAL_PRE_NORM, Tap, default_taps, parse_taps
from headrace.target.base import Target
from headrace.target.engine_target import EngineTarget
from headrace.token_rule import ALL_TOKENS, TokenRule


def capture(
    cfg: RunFile, folder: RunFolder, target: Target, progress: Progress, lent: RunFolder | None = None
) -> dict[str, Any]:
    """Capture every row that the store does not hold yet; states that came with the answers are taken first.

    Args: lent: another run's folder, whose states of answers are taken from and left; else the run's own, which are
        removed at the end.
    Returns: num_records, num_tokens, num_trained, bytes_raw, bytes_stored, num_failed, seconds, tokens_s (of this
    process), taps.
    Raises: CaptureError when more samples fail than capture.tolerate_failures; ConfigError or StoreError when the
    folder holds states of another identity.
    """
    opened = open_capture(cfg, folder, target, progress, lent or folder)
    prepared, encoder, stage = opened.prepared, opened.encoder, opened.stage
    known, codec = stage.state(), encoder.codec
    earlier = [fingerprint for fingerprint, _ in chain(prepared)[:-1]]
    with open_writer(folder.states, opened.manifest, cfg.store, earlier) as writer:
        opened.keep_basis(folder)  # beside a manifest that was found to name it
        for note in writer.notes:
            progress.note(f"states: {note}")
        work = _Capture(cfg, prepared, encoder, writer, progress, opened.spool)
        groups = work.missing_groups()
        if known == "done" and not groups:
            progress.note("states: captured before, kept")
            remove_spool(folder)
            return stage.summary()
        work.check_room()
        try:
            with RecordQueue(writer, cfg.store.queue_bytes) as work.queue:
                speed = work.run(groups)
        except StoreFull as exc:
            writer.seal()
            raise work.stopped(exc) from exc
    drift = {} if encoder.drift is None else {"drift": encoder.drift.summary()}
    if encoder.drift is not None and (told := encoder.drift.note()) is not None:
        progress.note(f"drift: {told}")
    summary = {**store_sizes(folder, prepared, codec), **speed, **drift, "taps": [str(tap) for tap in encoder.taps]}
    stage.finish(summary)
    remove_spool(folder)
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


def give_codec(cfg: RunFile, target: Target) -> None:
    """Tell the run's codec to engines that were started before it was fitted; to any other target nothing."""
    if isinstance(target, EngineTarget):
        taps = capture_taps(cfg, target.spec.num_blocks)
        target.adopt(*chosen_spec(cfg.capture.codec, len(taps), target.spec.hidden_size, cfg.states_dtype))


def token_rule(cfg: RunFile, taps: Sequence[Tap]) -> TokenRule:
    """The token rule of a run. Raises: ConfigError for a window where every token is kept."""
    own = cfg.capture
    if own.tokens == "all":
        if own.window is not None:
            raise ConfigError("capture.tokens needed, for capture.window", "capture.tokens all", "set or unset both")
        return ALL_TOKENS
    return TokenRule("supervised" if taps[-1] == FINAL_PRE_NORM else "context", own.window)


@dataclass
class GroupEncoder:
    """A capture group's samples to its records: one forward pass, checks, encoding; the same bytes each time."""

    target: Target
    taps: tuple[Tap, ...]
    codec: Codec
    rule: TokenRule
    drift: Drift | None = None

    def records(
        self, samples: Sequence[Sample], padded_tokens: int, wanted: Collection[int], generation: int
    ) -> tuple[list[Record], dict[int, str]]:
        """Run the whole group; check and encode its wanted rows.

        Args: samples: all members, in the group's order. wanted: rows whose records are needed.
        Returns: records in that order, and by row what is wrong with the samples that failed their check twice.
        Raises: CaptureError, CodecError, TargetError.
        """
        wrong: dict[int, str] = {}
        for _ in range(2):  # a fault that a second pass does not show was the machine's, not the sample's
            states = self._states(samples, padded_tokens)
            own = [(s, states_TLH) for s, states_TLH in zip(samples, states, strict=True) if s.row in wanted]
            wrong = self._faults(own)
            if not wrong:
                break
        sound = [(sample, states_TLH) for sample, states_TLH in own if sample.row not in wrong]
        return [self.record(sample, states_TLH, generation) for sample, states_TLH in sound], wrong

    def _states(self, samples: Sequence[Sample], padded_tokens: int) -> list[torch.Tensor]:
        states = self.target.states([s.input_ids for s in samples], self.taps, padded_tokens)
        if len(states) != len(samples):
            raise CaptureError(f"states of {len(samples)} samples", str(len(states)), "the target's adapter is broken")
        dtype = TORCH_DTYPES[self.codec.spec.dtype]  # rounded before they are checked: float16 may overflow
        return [own.to(dtype) for own in states]

    def _faults(self, states: Sequence[tuple[Sample, torch.Tensor]]) -> dict[int, str]:
        hidden_size = self.target.spec.hidden_size
        found = {s.row: check_states(own, s.input_ids, self.taps, hidden_size) for s, own in states}
        return {row: reason for row, reason in found.items() if reason is not None}

    def record(self, sample: Sample, states_TLH: torch.Tensor, generation: int, first: int = 0) -> Record:
        """Encode what the token rule keeps of states that were checked. Raises: CodecError.

        Args: states_TLH: of the sample's tokens from `first` on; none that the rule leaves out is needed.
        """
        start, end = self.rule.span(sample.loss_mask)
        spans = segment_spans(end - start, self.codec.spec.bytes_per_token(), start)
        payloads = [self.codec.encode(states_TLH[a - first : b - first]) for a, b in spans]
        if self.drift is not None:
            self.drift.see(sample.row, sample.source, states_TLH[start - first : end - first])
        return make_record(sample, spans, payloads, generation)


@dataclass(frozen=True)
class OpenedCapture:
    """What a capture is of, its stage begun; `fitted` is the folder of the codec's basis, if it has one."""

    prepared: PreparedSet
    encoder: GroupEncoder
    manifest: Manifest
    stage: Stage
    fitted: Path | None
    spool: Spool | None = None

    def keep_basis(self, folder: RunFolder) -> None:
        """Copy the codec's basis beside the states. Raises: CodecError for another basis."""
        copy_basis(self.encoder.codec.spec, self.fitted, folder.states)


def open_capture(
    cfg: RunFile, folder: RunFolder, target: Target, progress: Progress, answers: RunFolder | None = None
) -> OpenedCapture:
    """Put together what a capture needs, and begin its stage.

    Args: answers: the run whose states came with its answers, if they are to be taken.
    Raises: ConfigError when the folder holds states of another identity; CodecError, PrepareError, CaptureError.
    """
    prepared = PreparedSet.open(folder.prepared)
    taps = capture_taps(cfg, target.spec.num_blocks)
    spec, fitted = chosen_spec(cfg.capture.codec, len(taps), target.spec.hidden_size, cfg.states_dtype)
    _check_final(spec, taps)
    codec = open_codec(spec, fitted)
    manifest = states_manifest(cfg, target, taps, codec, prepared, kept_probe(folder))
    spool = None if answers is None else Spool.open(answers, manifest)
    if grown := adopt_growth(folder.states, prepared):
        progress.note(f"states: {grown}")
    stage = Stage(folder.states, "capture", _identity(cfg, manifest))
    if stage.state() == "new":
        stage.begin()
    encoder = GroupEncoder(target, taps, codec, token_rule(cfg, taps), Drift.of(codec))
    return OpenedCapture(prepared, encoder, manifest, stage, fitted, spool)


@dataclass
class _Capture:
    """One process's work on a store."""

    cfg: RunFile
    prepared: PreparedSet
    encoder: GroupEncoder
    writer: StoreWriter
    progress: Progress
    spool: Spool | None = None
    queue: RecordQueue | None = None

    def check_room(self) -> None:
        """Refuse, before the first forward pass, what will not fit. Raises: StoreFull."""
        lengths = self.prepared.lengths[self._missing_rows()]
        expected = expected_bytes(lengths.tolist(), self.encoder.codec.spec.bytes_per_token())
        own = self.writer
        check_room(own.root, own.num_bytes, expected, self.cfg.store.max_bytes, own.staged_bytes)

    def stopped(self, error: StoreFull) -> StoreFull:
        """The same error, with what is missing from the store as it is now."""
        rows = self._missing_rows()
        lengths = self.prepared.lengths[rows].tolist()
        more = expected_bytes(lengths, self.encoder.codec.spec.bytes_per_token())
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
        for records, num_tokens, figures in self._made(groups):
            assert self.queue is not None
            for record in records:
                self.queue.add(record)
            run_tokens += num_tokens
            done += sum(record.num_tokens for record in records)
            num_bytes += sum(record.num_bytes for record in records)
            seconds = max(time.monotonic() - started, 1e-9)
            self.progress.advance(done, tokens_s=run_tokens / seconds, MB=num_bytes / 1e6, **figures)
        if self.queue is not None:
            self.queue.flush()
        self.progress.end()
        seconds = max(time.monotonic() - started, 1e-9)
        return {"seconds": round(seconds, 3), "tokens_s": round(run_tokens / seconds, 1)}

    def _made(self, groups: Sequence[CaptureGroup]) -> Iterator[tuple[list[Record], int, dict[str, int]]]:
        """Records, the tokens that were run for them, and figures to show: by group, or as engines give them."""
        if self.spool is not None:
            yield from self._spooled(self.spool, groups)
            groups = self.missing_groups()
        target, encoder = self.encoder.target, self.encoder
        encodes = isinstance(target, EngineTarget) and target.encodes(encoder.codec.spec, encoder.taps)
        if isinstance(target, Fleet):
            yield from self._from_fleet(target, groups)
            return
        if not isinstance(target, EngineTarget) or not encodes or encoder.rule != ALL_TOKENS:
            for group in groups:
                yield self._group(group), int(self.prepared.lengths[list(group.rows)].sum()), {}
            return
        rows = [row for group in groups for row in group.rows if self._missing(row)]
        given = (encoder.codec, self.writer.generation, self.cfg.order.window_samples, encoder.drift)
        engines = EngineCapture(target, self.prepared.sample, encoder.taps, *given)
        for made in engines.run(rows, self.writer.root):
            if isinstance(made, Refused):
                self._fail(made.sample, made.reason, made.permanent)
                yield [], 0, engines.figures()
            else:
                yield [made], made.num_tokens, engines.figures()

    def _from_fleet(
        self, fleet: Fleet, groups: Sequence[CaptureGroup]
    ) -> Iterator[tuple[list[Record], int, dict[str, int]]]:
        """As the targets of a Ray cluster give them, in any order of groups."""
        work = [(group, [row for row in group.rows if self._missing(row)]) for group in groups]
        for made in fleet.run(work, self.prepared, self.encoder, self.writer.generation, self.writer.root):
            for row, (reason, permanent) in made.wrong.items():
                self._fail(self.prepared.sample(row), reason, permanent)
            yield made.records, made.num_tokens, {"targets": fleet.num_targets}

    def _spooled(
        self, spool: Spool, groups: Sequence[CaptureGroup]
    ) -> Iterator[tuple[list[Record], int, dict[str, int]]]:
        """Records of missing rows whose states came with their answers; durable when this ends."""
        num_taken = 0
        for row in (row for group in groups for row in group.rows if self._missing(row)):
            record = spool.take(self.prepared.sample(row), self.encoder, self.writer.generation)
            if record is not None:
                num_taken += 1
                yield [record], 0, {"with_answers": num_taken}
        assert self.queue is not None
        self.queue.flush()
        self.writer.seal()
        damaged = f", {spool.num_damaged} of them damaged" if spool.num_damaged else ""
        missing = len(self._missing_rows())
        self.progress.note(f"states: {num_taken} came with the answers, {missing} are to be captured{damaged}")

    def _group(self, group: CaptureGroup) -> list[Record]:
        """Records of the group's missing rows that pass their check; the others become failures."""
        missing = [row for row in group.rows if self._missing(row)]
        alone = isinstance(self.encoder.target, EngineTarget)  # an engine batches as it likes: no group to be kept
        samples = [self.prepared.sample(row) for row in (missing if alone else group.rows)]
        records, wrong = self.encoder.records(samples, group.padded_tokens, missing, self.writer.generation)
        for sample in samples:
            if sample.row in wrong:
                self._fail(sample, wrong[sample.row])
        return records

    def _fail(self, sample: Sample, reason: str, permanent: bool = True) -> None:
        self.writer.fail(sample.id, sample.row, reason, permanent)
        self.progress.note(f"row {sample.row} failed: {reason}")
        self._stop_if_too_many()

    def _stop_if_too_many(self) -> None:
        """Of earlier captures, what failed for good counts; what did not is tried again."""
        failed = [
            f
            for row, f in self.writer.failed.items()
            if row not in self.writer.committed and (f.permanent or f.generation == self.writer.generation)
        ]
        tolerated = self.cfg.capture.tolerate_failures * self.prepared.num_samples
        if len(failed) > tolerated:
            last = failed[-1]
            raise CaptureError(
                f"at most {self.cfg.capture.tolerate_failures:.1%} of {self.prepared.num_samples} samples to fail",
                f"{len(failed)}, the last one row {last.row}: {last.reason}",
                "mend the target; or raise capture.tolerate_failures and go on",
            )


def states_manifest(
    cfg: RunFile,
    target: Target,
    taps: Sequence[Tap],
    codec: Codec,
    prepared: PreparedSet,
    probe: Mapping[str, Any] | None,
) -> Manifest:
    """Of which states a store of this run is. Args: probe: what the last probe found. Raises: ConfigError."""
    told = {
        **({} if probe is None else {"probe": dict(probe)}),
        "group_tokens": cfg.capture.group_tokens,
        "window_samples": cfg.order.window_samples,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        **(target.provenance if isinstance(target, Fleet) else {}),
    }
    names, rule = [str(tap) for tap in taps], token_rule(cfg, taps)
    return make_manifest(asdict(target.spec), names, codec.spec, prepared.fingerprint, told, rule)


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
