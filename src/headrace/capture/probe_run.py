"""The probe of a run: whatever captures for it, all five parts, kept with the run.

In: a run file, its prepared set, the target or its engines. Out: the findings, in `probe.json` of the run's folder and,
where states exist already, in their manifest's provenance. Before a capture of many tokens it runs by itself.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from headrace.capture.capture import capture_taps
from headrace.capture.probe import PROBE_FILE, Finding, Probe, Texts, choose_texts, failed, raise_failed
from headrace.capture.subjects import EngineSubject, Ids, Reference, Subject, TransformersSubject
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.codec.registry import open_codec
from headrace.config import RunFile, RunFolder
from headrace.errors import StoreError
from headrace.files import read_stage, write_json
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.store.lock import StoreLock
from headrace.store.manifest import FILE_NAME, Manifest
from headrace.taps import Tap
from headrace.target.base import TargetSpec
from headrace.target.device import free_bytes
from headrace.target.engine_target import EngineTarget, engine_head
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import TransformersTarget
from headrace.target.weights import weight_files

_MEMORY_SHARE = 0.5  # of free memory that a reference's weights may take

Load = Callable[[], TransformersTarget]


def probe_run(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget | EngineTarget, load_reference: Load, progress: Progress
) -> list[Finding]:
    """Question everything that captures for a run, and keep what was found.

    Args: load_reference: gives the target in transformers; called for engines, where it fits into memory here.
    Raises: PrepareError where there is no prepared set; CaptureError for one too short; TargetError for an engine that
    is not there. Failed findings are returned, not raised.
    """
    prepared = PreparedSet.open(folder.prepared)
    taps = capture_taps(cfg, target.spec.num_blocks)
    reference = _reference(target, load_reference, progress)
    subjects, codec = _subjects(cfg, target, taps)
    head = _head(target)
    findings = hashes(target, folder, prepared)
    for subject in subjects:
        progress.note(f"probe: {subject.name}")
        texts = choose_texts(prepared, subject.chunk_tokens, subject.max_tokens)
        findings += _probed(Probe(subject, reference, target.spec.dtype), subject, texts, head, codec, taps)
    _keep(folder, findings)
    for finding in findings:
        progress.note(told(finding))
    return findings


def probe_before_capture(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget | EngineTarget, load_reference: Load, progress: Progress
) -> None:
    """Probe where more than `capture.probe_over` tokens are to be captured, and the capture is not done.

    Raises: CaptureError naming cause and fix of each failure; and as `probe_run`.
    """
    stage = read_stage(folder.states)
    tokens = int(PreparedSet.open(folder.prepared).lengths.sum())
    if tokens <= cfg.capture.probe_over or (stage is not None and stage["finished"]):
        return
    raise_failed(probe_run(cfg, folder, target, load_reference, progress), folder.root / PROBE_FILE)


def told(finding: Finding) -> str:
    """One line for people."""
    figures = ", ".join(f"{name} {value}" for name, value in finding.figures.items())
    line = f"probe: {'ok  ' if finding.ok else 'FAIL'} {finding.part}: {finding.what}" + (
        f" ({figures})" if figures else ""
    )
    return line if finding.ok else f"{line}\n  cause: {finding.cause}\n  fix: {finding.fix}"


def hashes(target: TransformersTarget | EngineTarget, folder: RunFolder, prepared: PreparedSet) -> list[Finding]:
    """Part 5: weights, tokenizer and template of engines, prepared set and store against the run's target."""
    spec = target.spec
    wrong: list[str] = []
    if isinstance(target, EngineTarget):
        for one in target.endpoints:
            served = one.served_from
            if served is not None and Path(served).resolve() != Path(one.file.model_folder).resolve():
                wrong.append(f"engine {one.name} serves {served}, not {one.file.model_folder}")
    for name in ("tokenizer_hash", "template_hash"):
        known = prepared.manifest.get(name)
        if known is not None and known != getattr(spec, name):
            wrong.append(f"the prepared set has another {name}: {known}, not {getattr(spec, name)}")
    wrong += _store_differences(folder, spec)
    fix = "prepare again with this target, or give the target (and engines) that the set and store were made with"
    what = "weights, tokenizer and template are the same everywhere"
    return [Finding("hashes", what, not wrong, {"weights": spec.weights_hash}, "; ".join(wrong), fix if wrong else "")]


def _store_differences(folder: RunFolder, spec: TargetSpec) -> list[str]:
    if not (folder.states / FILE_NAME).is_file():
        return []
    stored = Manifest.read(folder.states).target
    names = [
        name for name in ("weights_hash", "tokenizer_hash", "template_hash") if stored[name] != getattr(spec, name)
    ]
    return [f"the states in {folder.states} have another {name}" for name in names]


def _probed(
    probe: Probe, subject: Subject, texts: Texts, head: FrozenHead, codec: Codec | None, taps: Sequence[Tap]
) -> list[Finding]:
    first: dict[Ids, torch.Tensor] = {}
    for ids in dict.fromkeys((texts.one, texts.other, texts.shared, texts.long)):
        states = probe.logprobs(ids, head)
        if states is None:
            continue
        first[ids] = states
        probe.taps(ids, states)
        if codec is not None:
            probe.encoded(ids, states, codec, taps)
    probe.requests(texts, first)
    if not any(finding.part == "sound" for finding in probe.findings):
        probe.findings.append(Finding("sound", "counts, ids, finite, not zero, not repeating", True))
    return [replace(finding, what=f"{subject.name}: {finding.what}") for finding in probe.findings]


def _subjects(
    cfg: RunFile, target: TransformersTarget | EngineTarget, taps: tuple[Tap, ...]
) -> tuple[list[Subject], Codec | None]:
    if isinstance(target, TransformersTarget):
        return [TransformersSubject(target, taps)], None
    target.columns(taps)
    own = target.file.spec
    codec = None if own is None else open_codec(own, None if target.file.basis is None else Path(target.file.basis))
    encodes = codec is not None and target.encodes(codec.spec, taps)
    subjects: list[Subject] = []
    for endpoint in target.endpoints:
        endpoint.reopen()
        subjects.append(EngineSubject(endpoint, cfg.engine.flags, encodes))
    return subjects, codec if encodes else None


def _reference(target: TransformersTarget | EngineTarget, load_reference: Load, progress: Progress) -> Reference | None:
    if isinstance(target, TransformersTarget):
        return Reference(target)
    weights = sum(path.stat().st_size for path in weight_files(Path(target.file.model_folder)))
    needed = weights * (2 if target.spec.dtype == "float32" else 1)
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > _MEMORY_SHARE * free:
        progress.note(f"probe: no transformers forward, its weights of {needed / 1e9:.1f} GB do not fit here")
        return None
    return Reference(load_reference())


def _head(target: TransformersTarget | EngineTarget) -> FrozenHead:
    if isinstance(target, EngineTarget):
        return engine_head(target)
    return load_head(target.folder, target.model.config).to("cpu", TORCH_DTYPES[target.spec.dtype])


def _keep(folder: RunFolder, findings: Sequence[Finding]) -> None:
    wrong = failed(findings)
    brief = {
        "ok": not wrong,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "num_findings": len(findings),
        "failed": [f"{finding.part}: {finding.cause}" for finding in wrong],
    }
    write_json(folder.root / PROBE_FILE, {**brief, "findings": [finding.to_json() for finding in findings]})
    if (folder.states / FILE_NAME).is_file() and os.access(folder.states, os.W_OK):
        with suppress(StoreError):  # a capture that runs holds the store; its manifest has what was known at its start
            lock = StoreLock(folder.states)
            try:
                stored = Manifest.read(folder.states)
                replace(stored, provenance={**stored.provenance, "probe": brief}).write(folder.states)
            finally:
                lock.release()
