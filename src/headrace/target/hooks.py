"""Tapped places of a transformers model: hooks that collect their states, and stop a pass that has given them all.

In: a causal language model and taps. Out: tensors [B, T, L, H], taps in the order asked. Only tapped places carry a
hook, and only inside the context. What each tap is in transformers, and where a model keeps its blocks, stands here
and nowhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from headrace.errors import TargetError
from headrace.taps import EMBEDDING, FINAL_POST_NORM, FINAL_PRE_NORM, Tap


def text_part(model: PreTrainedModel) -> torch.nn.Module:
    """The decoder of a causal model: its blocks are `layers`, its final norm `norm`; of a multimodal one the text part.

    Raises: TargetError for a model that keeps them elsewhere.
    """
    inner: Any = model.model if hasattr(model, "model") else None
    inner = inner.language_model if hasattr(inner, "language_model") else inner
    if not isinstance(inner, torch.nn.Module) or not hasattr(inner, "layers") or not hasattr(inner, "norm"):
        raise TargetError(
            "blocks at model.layers or model.language_model.layers, and the final norm beside them",
            type(model).__name__,
            "this architecture is not supported yet",
        )
    return inner


class PassEnded(Exception):
    """The last tap of a pass has been taken; the blocks after it need not run."""


class Taps:
    """States of the last pass, by tap."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = tuple(taps)
        self._states: dict[Tap, torch.Tensor] = {}

    def put(self, tap: Tap, states_BTH: torch.Tensor) -> None:
        """Keep what a hook saw."""
        self._states[tap] = states_BTH

    @property
    def complete(self) -> bool:
        """Whether every tap has been seen since the last `take`."""
        return len(self._states) == len(self._taps)

    def take(self) -> torch.Tensor:
        """States [B, T, L, H] of the last pass; forgets them. Raises: TargetError if a tap was never reached."""
        missing = [str(tap) for tap in self._taps if tap not in self._states]
        if missing:
            raise TargetError("a pass that reaches every tap", f"none of {', '.join(missing)}", "run the model first")
        states = [self._states.pop(tap) for tap in self._taps]
        return torch.stack(states, dim=2)


@contextmanager
def hooked(model: PreTrainedModel, taps: Sequence[Tap], stop: bool) -> Iterator[Taps]:
    """Collect states of the taps in each pass inside the context.

    Args:
        stop: end each pass by PassEnded once all taps are taken.
    Raises: TargetError for a tap the model does not have.
    """
    seen = Taps(taps)
    handles: list[RemovableHandle] = []
    try:
        for tap in taps:
            handles.append(_hook(model, tap, _taker(seen, tap, stop)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _taker(seen: Taps, tap: Tap, stop: bool) -> Callable[[torch.Tensor], None]:
    def take(states_BTH: torch.Tensor) -> None:
        seen.put(tap, states_BTH)
        if stop and seen.complete:
            raise PassEnded

    return take


def _hook(model: PreTrainedModel, tap: Tap, take: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Hook the input of block 0, the output of a block, or either side of the final norm."""
    text: Any = text_part(model)
    blocks: torch.nn.ModuleList = text.layers
    norm: torch.nn.Module = text.norm

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    if tap == EMBEDDING:
        return blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    if tap == FINAL_PRE_NORM:
        return norm.register_forward_pre_hook(before, with_kwargs=True)
    if tap == FINAL_POST_NORM:
        return norm.register_forward_hook(after)
    if tap.block >= len(blocks):
        raise TargetError(f"a block from 0 to {len(blocks) - 1}", str(tap), "check the taps against the target's depth")
    return blocks[tap.block].register_forward_hook(after)
