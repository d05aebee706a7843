"""Encode stored states again with another codec, without the target.

In: a run whose states were captured as they are (raw, lossless or fp8), and a codec. Out: another run's folder with the
same prepared set and states in that codec, there or at an address; training goes on from there. A killed transcoding
goes on; failures are taken over.
"""

import shutil
from dataclasses import replace
from typing import Any

from headrace.capture.capture import store_sizes
from headrace.codec.base import record_states
from headrace.codec.registry import chosen_spec, copy_basis, open_codec
from headrace.codec.spec import OF_TAPS
from headrace.config import RunFile, RunFolder
from headrace.errors import CodecError
from headrace.files import Stage
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import make_record, segment_spans
from headrace.store.remote import open_reader, read_ahead
from headrace.store.remote_writer import open_writer


def transcode(
    cfg: RunFile, source: RunFolder, to: RunFolder, codec: str, progress: Progress, at: str | None = None
) -> dict[str, Any]:
    """Encode every record of `source`, or of the address that its run file names, into `to`.

    Args:
        codec: a short name, or the folder of a fitted codec.
        at: the address that gets the states, if `to` is not to keep them.
    Returns: num_records, num_tokens, num_trained, num_failed, bytes_raw, bytes_stored, taps, as a capture does.
    Raises: CodecError for one folder twice and for states that are encoded already; StoreError for damaged records.
    """
    if source.root.resolve() == to.root.resolve():
        raise CodecError("another run folder to write to", str(to.root), "give --out a folder of its own")
    place = cfg.store.at or source.states
    reader = open_reader(place)
    old = reader.manifest.codec
    if not old.of_taps:
        raise CodecError(f"states in {', '.join(OF_TAPS)}", old.name, "transcode from the raw run")
    spec, fitted = chosen_spec(codec, old.num_taps, old.hidden_size, old.dtype)
    if not (to.prepared / "manifest.json").is_file():
        shutil.copytree(source.prepared, to.prepared, dirs_exist_ok=True)
    prepared = PreparedSet.open(to.prepared)
    made_by = {**reader.manifest.provenance, "transcoded_from": f"{old.name} in {place}"}
    manifest = replace(reader.manifest, codec=spec, prepared=prepared.fingerprint, provenance=made_by)
    stage = Stage(to.states, "transcode", {**manifest.identity(), **({} if at is None else {"at": at})})
    if stage.state() == "done":
        progress.note("states: transcoded before, kept")
        return stage.summary()
    stage.begin()
    old_codec, new_codec = open_codec(old, source.states), open_codec(spec, fitted)
    with open_writer(to.states, manifest, cfg.store.model_copy(update={"at": at})) as writer:
        copy_basis(spec, fitted, to.states)
        missing = [row for row in reader.rows.tolist() if row not in writer.committed]
        progress.start("transcode", reader.num_records, "records", reader.num_records - len(missing))
        found = read_ahead(place, lambda s: reader.read(s.row, s.id), map(prepared.sample, missing))
        for number, (sample, record) in enumerate(found, reader.num_records - len(missing) + 1):
            states_TLH = record_states(record, old_codec)
            first = record.segments[0].token_start
            spans = segment_spans(record.num_tokens, spec.bytes_per_token(), first)
            payloads = [new_codec.encode(states_TLH[start - first : end - first]) for start, end in spans]
            writer.add(make_record(sample, spans, payloads, writer.generation))
            progress.advance(number)
        for row, failure in reader.failures.items():
            if failure.permanent and row not in reader and row not in writer.failed:
                writer.fail(bytes.fromhex(failure.id), row, failure.reason, permanent=True)
        progress.end()
    summary = {**store_sizes(to, prepared, new_codec), "taps": list(manifest.taps)}
    stage.finish(summary)
    return summary
