"""What a worker of a Ray cluster does: hold a target, and turn groups of samples into records.

In: groups as tables of `ASKED`, and what the driver said of target, taps, codec and rule. Out: tables of `MADE`:
records as they were sealed, reasons of rows that failed, errors as data, which the driver raises. A target of
transformers is loaded here; of vLLM each actor starts a server of its own, which encodes by itself.
"""

import json
import platform
import shutil
import socket
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace.capture.engines import EngineCapture, Refused
from headrace.codec.basis import FILE_NAME as BASIS_NAME
from headrace.codec.drift import Drift, lost_share
from headrace.codec.registry import open_codec
from headrace.codec.spec import SPEC_NAME, CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, HeadraceError, TargetError
from headrace.files import write_json
from headrace.prepare.model_files import load_config, load_tokenizer
from headrace.progress import Silent
from headrace.record import Record, Sample, sealed_message, segment_from_message
from headrace.store.manifest import TARGET_IDENTITY
from headrace.taps import parse_tap
from headrace.target.base import TargetSpec
from headrace.target.device import choose_device, run_dtype
from headrace.target.engine_target import open_engines
from headrace.target.transformers_target import load_target, own_engine, read_spec, target_folder
from headrace.target.vllm_command import LOOPBACK, find_vllm
from headrace.token_rule import ALL_TOKENS, TokenRule

if TYPE_CHECKING:
    from headrace.capture.capture import GroupEncoder

RESTARTS = 3  # of an actor's server that has died

ASKED = pa.schema(
    {
        "wanted": pa.list_(pa.int64()),
        "padded": pa.int64(),
        "samples": pa.list_(pa.large_binary()),
        "digests": pa.list_(pa.binary(16)),
    }
)
# A segment of a record; why a row has none, and whether it never will; or, with row -1, the end of a group: its tokens,
# or an error.
MADE = pa.schema(
    {
        "row": pa.int64(),
        "message": pa.large_binary(),
        "digest": pa.binary(16),
        "lost": pa.float64(),
        "reason": pa.string(),
        "permanent": pa.bool_(),
        "num_tokens": pa.int64(),
        "error": pa.string(),
    }
)
Wrong = dict[int, tuple[str, bool]]  # by row: what is wrong with it, and whether for good


@dataclass
class Losses(Drift):
    """Keeps what each record loses, for the driver to count."""

    by_row: dict[int, float] = field(default_factory=dict)

    def see(self, row: int, source: str, states_TLH: torch.Tensor) -> None:
        """Of one record's states [T, L, H]."""
        self.by_row[row] = lost_share(self.codec, states_TLH)


class GroupActor:
    """In a worker: a target, made ready at the first group; errors of ours travel as data, told by the driver."""

    def __init__(self, **told: Any) -> None:
        self._told = told
        self._maker: _Loaded | _Served | None = None

    def __call__(self, asked: pa.Table) -> pa.Table:
        """Groups to their records. Returns: rows of `MADE`."""
        rows: list[dict[str, Any]] = []
        try:
            if self._maker is None:
                cfg = RunFile.model_validate_json(self._told["run_file"])
                self._maker = _Served(cfg, self._told) if cfg.target.engine == "vllm" else _Loaded(cfg, self._told)
            for group in self._maker.together(asked.to_pylist()):
                rows += _group(self._maker, group)
        except HeadraceError as exc:
            rows.append({"row": -1, "error": error_text(exc)})
        return pa.Table.from_pylist(rows, MADE)


def _group(maker: "_Loaded | _Served", group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    own = [segment_from_message(*one) for one in zip(group["samples"], group["digests"], strict=True)]
    samples = [Sample(one.row, one.id, one.input_ids, one.loss_mask) for one in own]
    records, wrong = maker.records(samples, group["padded"], group["wanted"])
    losses = {} if maker.losses is None else maker.losses.by_row
    for record in records:
        for segment in record.segments:
            message, digest = sealed_message(segment)
            yield {"row": record.row, "message": bytes(message), "digest": digest, "lost": losses.get(record.row)}
    for row, (reason, permanent) in wrong.items():
        yield {"row": row, "reason": reason, "permanent": permanent}
    losses.clear()
    yield {"row": -1, "num_tokens": sum(sample.num_tokens for sample in samples)}


class _Loaded:
    """A target that this process holds; whole groups, each by itself."""

    def __init__(self, cfg: RunFile, told: Mapping[str, Any]) -> None:
        from headrace.capture.capture import GroupEncoder

        target = load_target(cfg.target)
        _check_target(target.spec, told)
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            codec = open_codec(_codec_files(told, Path(folder)), Path(folder))
        self.losses = Losses.of(codec)
        self._generation: int = told["generation"]
        taps = tuple(parse_tap(name) for name in told["taps"])
        self._encoder = GroupEncoder(target, taps, codec, TokenRule.parse(told["rule"]), self.losses)

    def together(self, groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Each on its own: a group fixes the bits of its members."""
        return groups

    def records(
        self, samples: Sequence[Sample], padded_tokens: int, wanted: Collection[int]
    ) -> tuple[list[Record], Wrong]:
        """Records of the wanted rows, and what is wrong with the others."""
        records, wrong = self._encoder.records(samples, padded_tokens, wanted, self._generation)
        return records, {row: (reason, True) for row, reason in wrong.items()}


class _Served:
    """vLLM of this actor's own, started again where it dies; it ends with the actor."""

    def __init__(self, cfg: RunFile, told: Mapping[str, Any]) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="headrace-actor-"))
        weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        spec = _codec_files(told, self._home)
        if told["basis"] is not None:
            cfg = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"codec": str(self._home)})})
        engine = cfg.engine.model_copy(update={"folders": []})
        self._cfg = cfg.model_copy(update={"run": str(self._home), "engine": engine})
        self._told, self._codec = told, open_codec(spec, self._home)
        self.losses = Losses.of(self._codec)
        self._samples: dict[int, Sample] = {}
        self._running = ExitStack()
        self._restarts = 0
        self._engines, self._encoder = self._start()

    def together(self, groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """All at once: a server batches as it likes, and wants many requests to do so."""
        joined = {key: [one for group in groups for one in group[key]] for key in ("wanted", "samples", "digests")}
        return [{**joined, "padded": max(group["padded"] for group in groups)}]

    def records(
        self, samples: Sequence[Sample], padded_tokens: int, wanted: Collection[int]
    ) -> tuple[list[Record], Wrong]:
        """Records of the wanted rows, and what is wrong with the others. Raises: TargetError for a dead server."""
        self._samples = {sample.row: sample for sample in samples}
        open_rows = dict.fromkeys(wanted)
        records: list[Record] = []
        wrong: Wrong = {}
        while open_rows:
            try:
                for made in self._made(list(open_rows), padded_tokens):
                    if isinstance(made, Refused):
                        wrong[made.sample.row] = (made.reason, made.permanent)
                        del open_rows[made.sample.row]
                    else:
                        records.append(made)
                        del open_rows[made.row]
            except TargetError:
                if self._restarts == RESTARTS:
                    raise
                self._restarts += 1
                self._running.close()
                self._engines, self._encoder = self._start()
        return records, wrong

    def _made(self, rows: Sequence[int], padded_tokens: int) -> Iterator[Record | Refused]:
        """As the server gives them; encoded here where it cannot, by the run's token rule."""
        if self._encoder is None:
            yield from self._engines.run(rows, self._home)
            return
        own = [self._samples[row] for row in rows]
        records, wrong = self._encoder.records(own, padded_tokens, rows, self._told["generation"])
        yield from records
        yield from (Refused(self._samples[row], reason, True) for row, reason in wrong.items())

    def _start(self) -> "tuple[EngineCapture, GroupEncoder | None]":
        from headrace.capture.capture import GroupEncoder
        from headrace.capture.engine_launch import Wish, prepared_engine, running

        folder = RunFolder(self._home)
        engine = self._running.enter_context(prepared_engine(self._cfg, folder, Wish(port=_free_port()), Silent()))
        self._running.enter_context(running(engine, Silent()))
        target = open_engines(self._cfg, folder)
        _check_target(target.spec, self._told)
        taps, rule = tuple(parse_tap(name) for name in self._told["taps"]), TokenRule.parse(self._told["rule"])
        own = (self._codec, self._told["generation"], self._cfg.order.window_samples, self.losses)
        engines = EngineCapture(target, lambda row: self._samples[row], taps, *own)
        encodes = target.encodes(self._codec.spec, taps) and rule == ALL_TOKENS
        return engines, None if encodes else GroupEncoder(target, taps, self._codec, rule, self.losses)


def _check_target(spec: TargetSpec, told: Mapping[str, Any]) -> None:
    """Raise CaptureError for another target than the driver's."""
    for name in TARGET_IDENTITY:
        if getattr(spec, name) != told["expected"][name]:
            found = f"{getattr(spec, name)} on {platform.node()}"
            expected = f"a target of {name} {told['expected'][name]} on every node"
            raise CaptureError(expected, found, "give all the same model")


def _codec_files(told: Mapping[str, Any], folder: Path) -> CodecSpec:
    """Spec and basis of the run's codec, as the folder of a fitted one."""
    write_json(folder / SPEC_NAME, told["codec"])
    if told["basis"] is not None:
        (folder / BASIS_NAME).write_bytes(told["basis"])
    return CodecSpec.from_json(told["codec"])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return int(one.getsockname()[1])


def hardware() -> str:
    """What this process captures with."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


def told_of(run_file: str) -> str:
    """In a worker: the target as it would load it, without its weights; JSON, a list for an error."""
    from headrace.capture.engine_launch import engine_dtype

    cfg = RunFile.model_validate_json(run_file)
    try:
        folder = target_folder(cfg.target.model)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(load_config(folder))].__name__
        if cfg.target.engine == "vllm":
            vllm = find_vllm(cfg.engine.python)
            engine, dtype = ("vllm", vllm.version), engine_dtype(cfg, vllm)
        else:
            engine, dtype = own_engine(), run_dtype(cfg.target.dtype, choose_device(cfg.target.device))
        spec = read_spec(cfg.target, folder, load_tokenizer(folder), architecture, dtype, engine)
    except HeadraceError as exc:
        return error_text(exc)
    return json.dumps({"spec": asdict(spec), "hardware": hardware(), "threads": torch.get_num_threads()})


def error_text(error: HeadraceError) -> str:
    """An error as data."""
    return json.dumps([type(error).__name__, *map(str, error.args)])
