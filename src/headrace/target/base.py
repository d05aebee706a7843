"""The second seam: what a target must offer, whichever engine runs it.

In: token ids of samples and names of taps. Out: hidden states per sample, answers, and the hashes that make states
of one target tell apart from another's. Numbers of layers never pass this seam; an adapter converts at its edge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.taps import Tap


@dataclass(frozen=True)
class TargetSpec:
    """Identity of a target: enough to refuse mixing states of two of them."""

    model: str
    architecture: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    dtype: str
    quantisation: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    engine: str
    engine_version: str


@dataclass(frozen=True)
class Generated:
    """One answer as ids, its end marker included if it was produced."""

    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class Target(Protocol):
    """A large model that answers and shows its states."""

    spec: TargetSpec

    def states(
        self, ids: Sequence[npt.NDArray[np.int32]], taps: Sequence[Tap], padded_tokens: int
    ) -> list[torch.Tensor]:
        """Run one capture group in one forward pass, right-padded to `padded_tokens`.

        Returns: for each sample, in order, a CPU tensor [T, L, H] in the target's dtype, taps in the order asked.
        Raises: TargetError for a tap that the engine cannot give.
        """
        ...

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
        """Answer prompts given as ids, `batch_size` at a time; greedy when temperature is 0.

        Args:
            told: called now and then with the numbers of tokens written and answers finished since its last call.
        """
        ...
