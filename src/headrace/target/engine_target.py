"""A target that servers run: the engines of a run as one.

In: a run file and the folders of its engines. Out: the target's identity read from its files, raw states of any
samples, answers, and the endpoints for whoever takes states as the engines encode them. The model is not loaded here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace.codec.base import TORCH_DTYPES
from headrace.codec.spec import CodecSpec
from headrace.config import RunFile, RunFolder
from headrace.errors import TargetError
from headrace.kinds import EngineConfig
from headrace.prepare.model_files import load_config, load_tokenizer
from headrace.taps import Tap
from headrace.target.base import Generated, TargetSpec
from headrace.target.channel import Delivery, DeliveryRefused
from headrace.target.endpoints import Answer, Endpoint, Request, endpoint_folders
from headrace.target.engine_file import EngineFile
from headrace.target.head import FrozenHead, load_head
from headrace.target.leases import Leases
from headrace.target.transformers_target import read_spec, target_folder

T = TypeVar("T")


class EngineTarget:
    """Engines that serve one model with the same columns and codec."""

    def __init__(self, spec: TargetSpec, endpoints: Sequence[Endpoint], cfg: EngineConfig) -> None:
        """Raises: TargetError for engines that differ from each other."""
        self.spec, self.endpoints, self.cfg = spec, list(endpoints), cfg
        for one in self.endpoints[1:]:
            if other := self.file.differences(one.file):
                name = other[0]
                found = f"{getattr(one.file, name)!r} in {one.folder}, not {getattr(self.file, name)!r}"
                raise TargetError(f"engines with the same {name}", found, "start them from one run file")

    @property
    def file(self) -> EngineFile:
        """What all of the engines serve."""
        return self.endpoints[0].file

    def encodes(self, spec: CodecSpec, taps: Sequence[Tap]) -> bool:
        """Whether the engines encode these taps with this codec themselves."""
        named = [self.file.taps[column] for column in self.file.encoded]
        own = self.file.spec
        return own is not None and own.to_json() == spec.to_json() and named == [str(tap) for tap in taps]

    def adopt(self, spec: CodecSpec, basis: Path | None) -> None:
        """Give a codec to engines that were started before it was fitted; they read their file when a payload is asked.

        Args: basis: the folder of its basis, if it has one.
        """
        for one in self.endpoints:
            if one.file.codec is None:
                folder = None if basis is None else str(basis.resolve())
                one.file = replace(one.file, codec=spec.to_json(), basis=folder)
                one.file.write(one.folder)

    def states(
        self, ids: Sequence[npt.NDArray[np.int32]], taps: Sequence[Tap], padded_tokens: int
    ) -> list[torch.Tensor]:
        """Raw states, each sample by its own request; `padded_tokens` means nothing to an engine.

        Raises: TargetError for a tap the engines do not capture; DeliveryError for a sample that they do not give.
        """
        columns = self.columns(taps)
        requests = [Request(tuple(own.tolist()), "states") for own in ids]

        def make(_: int, answer: Answer) -> torch.Tensor:
            assert answer.delivery is not None
            return delivered_states(answer.delivery, self.file)[:, columns]

        return self._all(requests, make)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        *,
        batch_size: int = 64,
        told: Callable[[int, int], None] | None = None,
    ) -> list[Generated]:
        """Answer prompts given as ids; `batch_size` means nothing to an engine, which batches by itself.

        Raises: DeliveryError for a prompt that they do not answer.
        """
        requests = answer_requests(prompts, max_new_tokens, temperature, top_p, seed)

        def make(_: int, answer: Answer) -> Generated:
            return generated(answer)

        return self._all(requests, make, lambda made: told and told(len(made.ids), 1))

    def columns(self, taps: Sequence[Tap]) -> list[int]:
        """The engines' columns of taps. Raises: TargetError for a tap that they do not capture."""
        missing = [str(tap) for tap in taps if str(tap) not in self.file.taps]
        if missing:
            found = f"{', '.join(missing)}, beside {', '.join(self.file.taps)}"
            raise TargetError("taps that the engines capture", found, "start them again: headrace engine --launch")
        return [self.file.taps.index(str(tap)) for tap in taps]

    def _all(
        self,
        requests: Sequence[Request],
        make: Callable[[int, Answer], T],
        told: Callable[[T], object] = lambda _: None,
    ) -> list[T]:
        made: dict[int, T] = {}
        for outcome in Leases(self.endpoints, self.cfg, make).run(enumerate(requests)):
            if outcome.error is not None:
                raise outcome.error
            assert outcome.made is not None
            made[outcome.number] = outcome.made
            told(outcome.made)
        return [made[number] for number in range(len(requests))]


def answer_requests(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> list[Request]:
    """Requests for answers alone; sampled ones have a seed each, by their place in the list."""
    return [
        Request(tuple(prompt), None, max_new_tokens, temperature, top_p, seed + n) for n, prompt in enumerate(prompts)
    ]


def generated(answer: Answer) -> Generated:
    """What an engine answered, as any target says it."""
    return Generated(answer.output_ids, "stop" if answer.finish_reason == "stop" else "length")


def delivered_states(delivery: Delivery, file: EngineFile) -> torch.Tensor:
    """All captured columns [T, C, H] of a delivery of kind `states`.

    Raises: DeliveryRefused for another number of bytes than the columns take.
    """
    dtype = TORCH_DTYPES.get(delivery.dtype)
    content = bytearray(b"".join(delivery.parts))
    expected = -1 if dtype is None else delivery.num_tokens * file.num_states * file.hidden_size * dtype.itemsize
    if dtype is None or len(content) != expected:
        found = f"{len(content)} in {delivery.dtype}"
        raise DeliveryRefused(f"{expected} bytes of raw columns", found, "start the engine again: headrace engine")
    return torch.frombuffer(content, dtype=dtype).view(delivery.num_tokens, file.num_states, file.hidden_size)


def engine_head(target: EngineTarget) -> FrozenHead:
    """Norm and head of what the engines serve, on the CPU in their dtype. Raises: TargetError as load_head does."""
    model = Path(target.file.model_folder)
    return load_head(model, load_config(model)).to("cpu", TORCH_DTYPES[target.spec.dtype])


def open_engines(cfg: RunFile, folder: RunFolder) -> EngineTarget:
    """The engines of a run, which need not answer yet.

    Raises: TargetError where there is none, or they serve another model than the run's, or in another dtype;
    ConfigError for a damaged engine.json.
    """
    paths = endpoint_folders(cfg.engine.folders, folder.root / "engines")
    endpoints = [Endpoint(path, cfg.engine.timeout_s, cfg.engine.in_flight) for path in paths]
    model = target_folder(cfg.target.model)
    for one in endpoints:
        if Path(one.file.model_folder).resolve() != model.resolve():
            found = f"{one.file.model_folder} in {one.folder}"
            raise TargetError(f"engines of the target in {model}", found, "start them from this run file")
        if cfg.target.dtype not in ("auto", one.file.dtype):
            found = f"{one.file.dtype} in {one.folder}"
            raise TargetError(f"engines that run in {cfg.target.dtype}", found, "start them from this run file")
    first = endpoints[0].file
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(load_config(model))].__name__
    engine = (first.engine, first.version)
    spec = read_spec(cfg.target, model, load_tokenizer(model), architecture, first.dtype, engine)
    return EngineTarget(spec, endpoints, cfg.engine)
