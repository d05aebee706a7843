"""The target's side of decoding: live, with its cache; or replayed from an answer it already gave.

In: ids to run after those already held. Out: logits and tapped states for them. The live one crops its cache when
drafted tokens fall. The replayed one needs no target: greedy acceptance asks only which token the target puts after
a prefix of its own answer, and the answer itself says that.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from transformers import DynamicCache

from headrace.errors import EvaluateError
from headrace.evaluate.decode import Plain, Verified
from headrace.taps import Tap
from headrace.target.transformers_target import TransformersTarget

_BEYOND = -1  # no token: after the end of an answer, or after a token the target did not choose


class LiveVerifier:
    """A transformers target with its KV cache; a context manager, since it watches taps by hooks."""

    def __init__(self, target: TransformersTarget, taps: Sequence[Tap]) -> None:
        """Args: taps: states to hand out with each pass, in this order; none to hand out none."""
        self._target = target
        self._taps = tuple(taps)
        self._cache = DynamicCache(config=target.model.config)
        self._hooks = ExitStack()

    def __enter__(self) -> "LiveVerifier":
        self._seen = self._hooks.enter_context(self._target.tap_states(self._taps)) if self._taps else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def feed(self, ids: Sequence[int], last_only: bool = False) -> Verified:
        """Run the target over `ids` after the tokens it holds."""
        logits_TV = self._target.model(
            input_ids=torch.tensor([list(ids)], device=self._target.model.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        ).logits[0]
        states_TLH = None if self._seen is None else self._seen.take()[0]
        return Verified(logits_TV.argmax(-1).tolist(), logits_TV, states_TLH)

    def keep(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens. Raises: EvaluateError when fewer are held."""
        held = self._cache.get_seq_length()
        if num_tokens > held:
            raise EvaluateError(f"at most {held} tokens to keep", str(num_tokens), "feed them first")
        if num_tokens < held:
            self._cache.crop(num_tokens - held)  # below 0: how many to remove, in every version of transformers


class ReplayVerifier:
    """A plain greedy answer in place of the target that gave it."""

    def __init__(self, plain: Plain) -> None:
        self._ids = [*plain.prompt_ids, *plain.ids]
        self._states_TLH = plain.states_TLH
        self._held = 0

    def feed(self, ids: Sequence[int], last_only: bool = False) -> Verified:
        """Say what the target put after each of `ids`, as long as they are its own."""
        own_ids = []
        same = True
        for place, token in enumerate(ids, self._held):
            same = same and place + 1 < len(self._ids) and self._ids[place] == token
            own_ids.append(self._ids[place + 1] if same else _BEYOND)
        states_TLH = None if self._states_TLH is None else self._states_TLH[self._held : self._held + len(ids)]
        self._held += len(ids)
        return Verified(own_ids[-1:] if last_only else own_ids, None, states_TLH)

    def keep(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` tokens."""
        self._held = num_tokens
