"""What a probe questions: engines or a transformers target, and the reference it compares them with.

In: token ids. Out: raw states of all captured columns, encoded ones, and log-probabilities of the text's own tokens;
of the reference, states at any tap by a forward pass that shares no hook with a capture where it can do without.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from headrace.codec.base import Codec
from headrace.taps import FINAL_POST_NORM, FINAL_PRE_NORM, Tap, parse_tap, to_transformers
from headrace.target.endpoints import Endpoint, Request
from headrace.target.engine_target import delivered_states
from headrace.target.hooks import hooked
from headrace.target.transformers_target import TransformersTarget

Ids = tuple[int, ...]
CHUNK_FLAG = "--max-num-batched-tokens"
_CHUNK_TOKENS = 2048  # vLLM's own, where the flag is not given
_TOGETHER = 4
_PADDING = 8
_TOP = 1  # logprobs of each token beside the text's own


class Subject(Protocol):
    """Whatever gives states; `columns` hold final:pre_norm; `together` requests may run at a time."""

    name: str
    columns: tuple[Tap, ...]
    chunk_tokens: int
    max_tokens: int | None
    together: int

    def states(self, ids: Ids) -> torch.Tensor:
        """Raw states [T, C, H] by a plain request. Raises: DeliveryError."""
        ...

    def with_logprobs(self, ids: Ids) -> tuple[torch.Tensor, list[dict[int, float]]]:
        """Raw states by a request that skips every cache, and logprobs of each token. Raises: DeliveryError."""
        ...

    def features(self, ids: Ids, codec: Codec) -> torch.Tensor | None:
        """Features [T, F] of what it encodes itself; None where it encodes nothing. Raises: DeliveryError."""
        ...

    def abort(self, ids: Ids) -> None:
        """Ask, and go away before the answer."""
        ...


class EngineSubject:
    """One engine."""

    def __init__(self, endpoint: Endpoint, flags: Sequence[str], encodes: bool) -> None:
        """Args: flags: of `vllm serve`. encodes: whether it encodes with the run's codec."""
        self._endpoint, self._encodes = endpoint, encodes
        self.name = endpoint.name
        self.columns = tuple(parse_tap(name) for name in endpoint.file.taps)
        self.chunk_tokens, self.together = _flag(flags), _TOGETHER
        self.max_tokens = None if endpoint.max_model_len is None else endpoint.max_model_len - 1

    def states(self, ids: Ids) -> torch.Tensor:
        """By a plain request."""
        delivery = self._endpoint.ask(Request(ids, "states")).delivery
        assert delivery is not None
        return delivered_states(delivery, self._endpoint.file)

    def with_logprobs(self, ids: Ids) -> tuple[torch.Tensor, list[dict[int, float]]]:
        """vLLM never takes a request with prompt_logprobs from its prefix cache."""
        answer = self._endpoint.ask(Request(ids, "states", prompt_logprobs=_TOP))
        assert answer.delivery is not None
        return delivered_states(answer.delivery, self._endpoint.file), answer.prompt_logprobs

    def features(self, ids: Ids, codec: Codec) -> torch.Tensor | None:
        """Of the payload that the engine encodes."""
        if not self._encodes:
            return None
        delivery = self._endpoint.ask(Request(ids)).delivery
        assert delivery is not None
        spans = zip(delivery.spans, delivery.parts, strict=True)
        return torch.cat([codec.features(part, end - start) for (start, end), part in spans])

    def abort(self, ids: Ids) -> None:
        """By a client that waits for the connection alone."""
        self._endpoint.abandon(Request(ids))


class TransformersSubject:
    """The target in this process."""

    def __init__(self, target: TransformersTarget, taps: Sequence[Tap]) -> None:
        self._target = target
        self.name = "transformers"
        self.columns = tuple(taps) if FINAL_PRE_NORM in taps else (*taps, FINAL_PRE_NORM)
        self.chunk_tokens, self.together = 0, 1
        self.max_tokens: int | None = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)

    def states(self, ids: Ids) -> torch.Tensor:
        """As a capture does: padded, in a group with another sample."""
        own = np.array(ids, dtype=np.int32)
        return self._target.states([own[: len(own) // 2 + 1], own], self.columns, len(own) + _PADDING)[1]

    @torch.inference_mode()
    def with_logprobs(self, ids: Ids) -> tuple[torch.Tensor, list[dict[int, float]]]:
        """Of the model's own logits."""
        device = self._target.model.device
        logits = self._target.model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        rows = logits.float().log_softmax(-1).cpu()
        found: list[dict[int, float]] = [{}]
        for row, token in zip(rows[:-1], ids[1:], strict=True):
            found.append({token: float(row[token]), int(row.argmax()): float(row.max())})
        return self.states(ids), found

    def features(self, ids: Ids, codec: Codec) -> torch.Tensor | None:
        """None: what it captures is encoded by the capture."""
        return None

    def abort(self, ids: Ids) -> None:
        """Nothing to go away from."""


class Reference:
    """A transformers forward pass of the whole model, which says what states ought to be."""

    def __init__(self, target: TransformersTarget) -> None:
        self._target = target
        self.num_blocks = target.spec.num_blocks

    @torch.inference_mode()
    def states(self, ids: Ids, taps: Sequence[Tap]) -> dict[Tap, torch.Tensor]:
        """States [T, H] by tap, on the CPU: of `output_hidden_states`; either side of the final norm by a hook."""
        last = Tap("after_block", self.num_blocks - 1)
        by_hook = [tap for tap in taps if tap in (FINAL_PRE_NORM, FINAL_POST_NORM, last)]
        with hooked(self._target.model, by_hook, stop=False) as seen:
            device = self._target.model.device
            given = torch.tensor([ids], device=device)
            out = self._target.model(input_ids=given, output_hidden_states=True, use_cache=False)
            found = dict(zip(by_hook, seen.take()[0].unbind(1), strict=True)) if by_hook else {}
        for tap in taps:
            if tap not in found:
                found[tap] = out.hidden_states[to_transformers(tap, self.num_blocks)][0]
        return {tap: states.cpu() for tap, states in found.items()}


def _flag(flags: Sequence[str]) -> int:
    for n, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name.replace("_", "-") == CHUNK_FLAG:
            value = value or (flags[n + 1] if n + 1 < len(flags) else "")
            return int(value) if value.isdecimal() else _CHUNK_TOKENS
    return _CHUNK_TOKENS
