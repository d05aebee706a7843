"""What must hold for captured states before they count: each check turns a silent fault into a reason.

In: one sample's ids and its states. Out: None, or one sentence that says what is wrong, where. Pure functions.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.taps import Tap

_KEY_NUMBERS = 8


def check_states(
    states_TLH: torch.Tensor, input_ids: npt.NDArray[np.int32], taps: Sequence[Tap], hidden_size: int
) -> str | None:
    """Say what is wrong with one sample's states; None if nothing is.

    Checked in this order: rows equal tokens, every number finite, no tap of a token all zero or constant, no two
    different tokens with the same states.
    """
    expected = (len(input_ids), len(taps), hidden_size)
    if tuple(states_TLH.shape) != expected:
        return f"states {list(states_TLH.shape)} for tokens, taps and width {list(expected)}"
    wrong = None if _has_content(states_TLH) else non_finite(states_TLH, taps) or without_content(states_TLH, taps)
    return wrong or repeated_rows(states_TLH, input_ids, taps)


def _has_content(states_TLH: torch.Tensor) -> bool:
    """Whether every row is finite and not constant; several times as fast as finding out which is not."""
    high_TL, low_TL = states_TLH.amax(-1), states_TLH.amin(-1)  # a NaN is both
    return bool((high_TL.isfinite() & low_TL.isfinite() & (high_TL != low_TL)).all())


def non_finite(states_TLH: torch.Tensor, taps: Sequence[object]) -> str | None:
    """Find the first token and tap with a NaN or an infinity."""
    bad_TL = ~states_TLH.isfinite().all(-1)
    return f"not finite at {_where(bad_TL, taps)}" if bad_TL.any() else None


def without_content(states_TLH: torch.Tensor, taps: Sequence[object]) -> str | None:
    """Find the first token and tap whose numbers are all the same: zero or another."""
    first_TL1 = states_TLH[..., :1]
    bad_TL = (states_TLH == first_TL1).all(-1)
    if states_TLH.shape[-1] < 2 or not bad_TL.any():
        return None
    token, tap = bad_TL.nonzero()[0].tolist()
    value = float(first_TL1[token, tap, 0])
    return f"{'all zero' if value == 0 else f'all {value:g}'} at {_where(bad_TL, taps)}"


def repeated_rows(states_TLH: torch.Tensor, input_ids: npt.NDArray[np.int32], taps: Sequence[object]) -> str | None:
    """Find two tokens that differ and yet have the same states: a stale buffer, or rows of another token.

    Equal tokens may have equal states (the embedding tap, or a text that begins with one token repeated).
    """
    for n, tap in enumerate(taps):
        own_TH = states_TLH[:, n]
        # a few numbers find candidates fast; whole rows decide
        stride = max(1, own_TH.shape[1] // _KEY_NUMBERS)
        keys = own_TH[:, ::stride].contiguous().view(torch.uint8).cpu().numpy()
        content, size = keys.tobytes(), keys.shape[1]
        seen: dict[bytes, int] = {}
        for token in range(len(own_TH)):
            earlier = seen.setdefault(content[token * size : (token + 1) * size], token)
            if input_ids[earlier] != input_ids[token] and torch.equal(own_TH[earlier], own_TH[token]):
                return f"tokens {earlier} and {token} differ but have the same states at {tap}"
    return None


def _where(bad_TL: torch.Tensor, taps: Sequence[object]) -> str:
    token, tap = bad_TL.nonzero()[0].tolist()
    return f"token {token}, {taps[tap]} ({int(bad_TL.sum())} of {bad_TL.numel()} in all)"
