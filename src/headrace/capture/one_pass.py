"""Answers and their states in one pass of the engines.

In: prompts, and engines that give rows for prompt and answer but the answer's last token, which they never read. Out:
the answers; and, in the spool, the record of each that passed its check, of just the sample that prepare makes of it
(prompt ids, then answer ids), durable before the answers are handed over. One request in a window's number of them is
proved: its last states must give the engine's own predictions of the prompt, and, when greedy, the answer itself.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch

from headrace.capture.capture import GroupEncoder, capture_taps, states_manifest, token_rule
from headrace.capture.check import check_states
from headrace.capture.engines import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    PREDICTIONS,
    PROBE_HINT,
    Unproved,
    check_predictions,
)
from headrace.capture.growth import adopt_growth
from headrace.capture.probe import LOGPROB_TOLERANCE, head_logits
from headrace.capture.spool import spool_root
from headrace.codec.base import TORCH_DTYPES
from headrace.codec.drift import Drift
from headrace.codec.registry import chosen_spec, copy_basis, open_codec
from headrace.codec.spec import is_auto, is_latent
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError, CodecError, TargetError
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import Record, Sample, sample_id
from headrace.store.budget import StoreFull, check_room, expected_bytes
from headrace.store.queue import RecordQueue
from headrace.store.writer import StoreWriter
from headrace.taps import FINAL_PRE_NORM
from headrace.target.base import Generated, Target
from headrace.target.channel import DeliveryError
from headrace.target.endpoints import Answer, Request
from headrace.target.engine_target import EngineTarget, answer_requests, delivered_states, engine_head, generated
from headrace.target.leases import Leases

Told = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Answered:
    """One answer; its record, or why there is none; and states [T, L, H] of a request that was proved."""

    generated: Generated
    record: Record | None = None
    wrong: str = ""
    proved: tuple[Sample, torch.Tensor] | None = None


class OnePass:
    """Writes the spool of a run from construction until its end as a context."""

    def __init__(
        self, cfg: RunFile, folder: RunFolder, prompts: PreparedSet, target: Target, progress: Progress
    ) -> None:
        """Open the spool, or go on with it.

        Raises: TargetError for a target without engines, or a tap they do not capture; StoreFull where a codec is yet
        to be fitted and raw states do not fit; ConfigError, CodecError; StoreError for a spool of another identity.
        """
        if not isinstance(target, EngineTarget):
            raise TargetError("engines, for answers with their states", type(target).__name__, "set target.engine=vllm")
        self._cfg, self._prompts, self._target, self._progress = cfg, prompts, target, progress
        root = spool_root(folder)
        taps = capture_taps(cfg, target.spec.num_blocks)
        self._columns = target.columns(taps)
        setting = "raw" if _unfitted(cfg.capture.codec) else cfg.capture.codec
        spec, fitted = chosen_spec(setting, len(taps), target.spec.hidden_size, cfg.states_dtype)
        codec = open_codec(spec, fitted)
        self._encoder = GroupEncoder(target, taps, codec, token_rule(cfg, taps))
        self._drift = Drift.of(codec)
        root.mkdir(parents=True, exist_ok=True)
        if setting != cfg.capture.codec:
            self._check_room(folder)
        adopt_growth(root, prompts)
        manifest, own = states_manifest(cfg, target, taps, codec, prompts, None), cfg.store
        self._writer = StoreWriter(root, manifest, own.shard_bytes, own.shard_seconds, max_bytes=own.max_bytes)
        copy_basis(spec, fitted, root)
        self._head = engine_head(target)
        self._bad: set[int] = set()
        self._turn = threading.Lock()

    def __enter__(self) -> "OnePass":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        if self._drift is not None and (told := self._drift.note()) is not None:
            self._progress.note(f"drift: {told}")

    def answers(self, rows: Sequence[int], done: Collection[int], told: Told) -> dict[int, Generated]:
        """Answer a chunk of prompts, those left out that are done; states of all that passed are durable on return.

        Args: told: called with the tokens and the number of answers that came.
        Returns: answers by row.
        Raises: DeliveryError for a prompt that is not answered; CaptureError for states that do not give the engine's
        own predictions; TargetError when no engine is left; StoreError, StoreFull.
        """
        samples = [self._prompts.sample(row) for row in rows]
        for row in rows:
            if row not in done and row in self._writer.committed:
                self._writer.forget(row)  # its answer was lost to a kill, and the next one may be another
        leases = Leases(self._target.endpoints, self._target.cfg, lambda n, answer: self._made(samples[n], answer))
        wanted = [(n, request) for n, request in enumerate(self._requests(samples)) if rows[n] not in done]
        found: dict[int, Generated] = {}
        with RecordQueue(self._writer, self._cfg.store.queue_bytes) as queue:
            for outcome in leases.run(wanted):
                row = rows[outcome.number]
                if isinstance(outcome.error, Unproved):
                    expected, wrong, hint = outcome.error.args
                    where = f"{expected}, of prompt {row}"
                    raise CaptureError(where, wrong, f"{hint}; what is answered stays")
                if outcome.error is not None:
                    raise outcome.error
                assert outcome.made is not None
                self._keep(row, outcome.made, queue)
                found[row] = outcome.made.generated
                told(len(found[row].ids), 1)
        self._writer.seal()
        return found

    def _keep(self, row: int, made: Answered, queue: RecordQueue) -> None:
        if made.record is not None:
            queue.add(made.record)
        if made.wrong:
            self._progress.note(f"prompt {row}: answered; its states are left to the capture: {made.wrong}")
        if self._drift is not None and made.proved is not None:
            sample, states_TLH = made.proved
            self._drift.see(sample.row, sample.source, states_TLH)

    def _requests(self, samples: Sequence[Sample]) -> list[Request]:
        """Requests for answer and states; with logprobs of the prompt for one of every `order.window_samples`."""
        how = self._cfg.regenerate
        prompts = [sample.input_ids.tolist() for sample in samples]
        plain = answer_requests(prompts, how.max_new_tokens, how.temperature, how.top_p, how.seed)
        size = self._cfg.order.window_samples
        proved = {n for n in range(0, len(samples), size) if samples[n].num_tokens >= FEWEST_TOKENS}
        return [
            replace(one, kind="states", output_states=True, prompt_logprobs=1 if n in proved else None)
            for n, one in enumerate(plain)
        ]

    def _made(self, prompt: Sample, answer: Answer) -> Answered:
        """In a server's thread. Raises: DeliveryError at a first fault of an answer's states; Unproved."""
        assert answer.delivery is not None
        made = generated(answer)
        sample = answered_sample(prompt, made)
        states = delivered_states(answer.delivery, self._target.file)
        own = states[:, self._columns].to(TORCH_DTYPES[self._encoder.codec.spec.dtype])
        wrong = check_states(own, sample.input_ids[:-1], self._encoder.taps, self._target.spec.hidden_size)
        proved = None
        if wrong is None and answer.prompt_logprobs:
            self._prove(states, prompt, answer)
            proved = (sample, own) if self._drift is not None else None
        if self._cfg.regenerate.drop_cut and made.finish_reason == "length":
            return Answered(made, None, "", proved)
        try:
            record = self._encoder.record(sample, own, self._writer.generation) if wrong is None else None
        except CodecError as exc:
            record, wrong = None, f"{exc.args[1]} (expected {exc.args[0]})"
        if wrong is None:
            return Answered(made, record, "", proved)
        with self._turn:
            again = prompt.row in self._bad
            self._bad.add(prompt.row)
        if not again:
            raise DeliveryError(f"sound states of prompt {prompt.row}", wrong, PROBE_HINT)
        return Answered(made, None, wrong)

    def _prove(self, states_TCH: torch.Tensor, prompt: Sample, answer: Answer) -> None:
        """Raises: Unproved for last states that do not give the prompt's logprobs, or the greedy answer."""
        ids = tuple(prompt.input_ids.tolist())
        check_predictions(states_TCH[: len(ids)], ids, answer, self._target, self._head)
        taps = self._target.file.taps
        if self._cfg.regenerate.temperature > 0 or str(FINAL_PRE_NORM) not in taps:
            return
        output = torch.tensor(answer.output_ids[:MOST_TOKENS])
        final = states_TCH[len(ids) - 1 :, taps.index(str(FINAL_PRE_NORM))][: len(output)]
        logits = head_logits(self._head, self._head.normed(final))
        short = float((logits.amax(-1) - logits.gather(1, output[:, None])[:, 0]).mean())
        if short > LOGPROB_TOLERANCE[self._target.spec.dtype]:
            found = f"the answer's own tokens {short:.3f} below the most probable ones, on average"
            raise Unproved(PREDICTIONS, found, PROBE_HINT)

    def _check_room(self, folder: RunFolder) -> None:
        """Raw states until the codec is fitted, if they fit. Raises: StoreFull."""
        longest = (self._prompts.lengths + self._cfg.regenerate.max_new_tokens).tolist()
        expected = expected_bytes(longest, self._encoder.codec.spec.bytes_per_token())
        name = self._cfg.capture.codec
        try:
            check_room(spool_root(folder), 0, expected, self._cfg.store.max_bytes)
        except StoreFull as exc:
            hint = "fit it first (headrace codec fit) and name its folder in capture.codec, or answer without states"
            where = f"{exc.args[0]}, raw until capture.codec {name} is fitted"
            raise StoreFull(where, f"{exc.args[1]} at most", hint) from exc
        self._progress.note(f"answers: states are kept raw until {name} is fitted, at most {expected / 1e9:.2f} GB")


def answered_sample(prompt: Sample, answer: Generated) -> Sample:
    """The sample that prepare makes of a prompt and its answer, at the prompt's row."""
    ids = np.array([*prompt.input_ids.tolist(), *answer.ids], dtype=np.int32)
    mask = (np.arange(len(ids)) >= prompt.num_tokens).astype(np.uint8)
    return Sample(prompt.row, sample_id(ids, mask), ids, mask, prompt.source, prompt.heldout)


def _unfitted(setting: str) -> bool:
    """Whether a codec is fitted, or chosen, on a prepared set that is yet to be made."""
    return is_auto(setting) or is_latent(setting)
