"""Fit a latent codec: which directions of the states to keep, and how finely.

In: raw states of a calibration slice, gone through twice, by source; and, if there is one, the `fc` of a drafter that
reads the same taps. Out: a spec and its basis. Taps are divided by their RMS, tokens with massive activations are left
out of every sum and escape, the second moment is uncentred, and directions are the strongest (pca), or those that `fc`
reads (fc): with fc C^1/2 = U S V', rows of U_r' fc, orthonormalised.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.codec.basis import Basis
from headrace.codec.quantised import scaled_norm
from headrace.codec.rotation import Rotation
from headrace.codec.spec import BITS, GROUP, CodecSpec, split_groups
from headrace.errors import CodecError

ESCAPE_NORM = 8.0  # a tap of a token so many times its usual RMS is a massive activation
MOST_ESCAPES = 0.05  # of all tokens; more are no outliers, and would weigh more than they save
_TOKENS_A_DIRECTION = 4

States = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Moments:
    """What a calibration slice says: one over the RMS of each tap, second moment [W, W] and mean [W] of scaled states.

    `num_tokens` without the `num_escaped`; `by_source` counts tokens.
    """

    inverse_rms_L: torch.Tensor
    second_WW: torch.Tensor
    mean_W: torch.Tensor
    num_tokens: int
    num_escaped: int
    by_source: dict[str, int]

    @property
    def escape_share(self) -> float:
        """Of all tokens."""
        return self.num_escaped / max(1, self.num_tokens + self.num_escaped)


def measure_moments(states: States) -> Moments:
    """Go through the slice twice.

    Args: states: called for each pass; gives (source, states [T, L, H]) of samples.
    Raises: CodecError for no tokens, a tap that is zero everywhere, and more massive tokens than an escape is for.
    """
    inverse_rms_L = _inverse_rms(states)
    second_WW = mean_W = torch.zeros(0)
    num_tokens = num_escaped = 0
    by_source: dict[str, int] = {}
    for source, own in states():
        massive_T = scaled_norm(own, inverse_rms_L) > ESCAPE_NORM
        x_TW = (own[~massive_T].float() * inverse_rms_L[:, None]).flatten(1)
        if not num_tokens and not num_escaped:
            second_WW, mean_W = torch.zeros(x_TW.shape[1], x_TW.shape[1]), torch.zeros(x_TW.shape[1])
        second_WW.addmm_(x_TW.T, x_TW)
        mean_W += x_TW.sum(0)
        num_tokens, num_escaped = num_tokens + len(x_TW), num_escaped + int(massive_T.sum())
        by_source[source] = by_source.get(source, 0) + len(own)
    if num_escaped > MOST_ESCAPES * (num_tokens + num_escaped):
        raise CodecError(
            f"at most {MOST_ESCAPES:.0%} of tokens with massive activations",
            f"{num_escaped} of {num_tokens + num_escaped}",
            "fit on more text, or use rotated",
        )
    return Moments(inverse_rms_L, second_WW / num_tokens, mean_W / num_tokens, num_tokens, num_escaped, by_source)


def _inverse_rms(states: States) -> torch.Tensor:
    """One over each tap's RMS over tokens whose own is at most ESCAPE_NORM times the median."""
    rms_TL = torch.cat([own.float().square().mean(-1).sqrt() for _, own in states()] or [torch.zeros(0, 1)])
    if not len(rms_TL):
        raise CodecError("states to fit on", "no token", "capture a slice first")
    usual_L = rms_TL.median(0).values
    if bool((usual_L == 0).any()):
        raise CodecError("taps that are not zero everywhere", str(usual_L.tolist()), "capture again")
    kept = (rms_TL / usual_L).amax(1) <= ESCAPE_NORM
    return rms_TL[kept].square().mean(0).sqrt().reciprocal()


def fit_latent(
    moments: Moments,
    spec: CodecSpec,
    rank: int,
    bits: float,
    fc_HW: torch.Tensor | None = None,
    scheme: Literal["rotate", "water"] = "rotate",
    group: int = GROUP,
    told: dict[str, Any] | None = None,
) -> tuple[CodecSpec, Basis]:
    """Choose r directions and their bits.

    Args:
        spec: the raw states' own; gives taps, width and dtype.
        bits: of a coordinate, on average; a whole number for `rotate`.
        fc_HW: [H, L*H] over raw taps; None takes the strongest directions.
        scheme: rotate: equal bits, each group rotated; water: bits by energy, coordinates as they are.
    Raises: CodecError for a rank beyond what `fc` or the slice can tell, and for bits there are not.
    """
    if not 1 <= rank <= spec.width or (fc_HW is not None and rank > len(fc_HW)):
        most = spec.width if fc_HW is None else min(spec.width, len(fc_HW))
        raise CodecError(f"a rank from 1 to {most}", str(rank), "choose fewer directions")
    if moments.num_tokens < _TOKENS_A_DIRECTION * rank:
        raise CodecError(
            f"at least {_TOKENS_A_DIRECTION * rank} tokens for {rank} directions",
            str(moments.num_tokens),
            "fit on a larger slice, or with a lower rank",
        )
    projection_RW = _strongest(moments.second_WW, rank) if fc_HW is None else _read_by(fc_HW, moments, rank)
    energy_R = torch.einsum("rw,wv,rv->r", projection_RW, moments.second_WW, projection_RW)
    if scheme == "rotate":
        if bits not in BITS:
            raise CodecError(f"{', '.join(map(str, BITS))} bits a coordinate", str(bits), "or scheme water")
        groups = split_groups(rank, int(bits), group)
        projection_RW = _rotate_groups(projection_RW, [size for size, _ in groups])
    else:
        groups = water_fill(energy_R, bits, group)
    parameters = {"groups": groups, "escape_share": round(moments.escape_share, 6)}
    fitted = CodecSpec("latent", 0, spec.num_taps, spec.hidden_size, spec.dtype, parameters)
    kept = float(energy_R.sum() / moments.second_WW.diagonal().sum())
    about = {
        "directions": "pca" if fc_HW is None else "fc",
        "scheme": scheme,
        "energy_kept": round(kept, 4),
        "num_tokens": moments.num_tokens,
        "by_source": moments.by_source,
        **(told or {}),
    }
    offset_R = projection_RW @ moments.mean_W
    return fitted, Basis(moments.inverse_rms_L, offset_R, projection_RW.contiguous(), ESCAPE_NORM, about)


def _strongest(second_WW: torch.Tensor, rank: int) -> torch.Tensor:
    """Eigenvectors of the largest eigenvalues, strongest first, [r, W]."""
    vectors: torch.Tensor = torch.linalg.eigh(second_WW.double())[1]
    return vectors[:, -rank:].flip(1).T.float()


def _read_by(fc_HW: torch.Tensor, moments: Moments, rank: int) -> torch.Tensor:
    """Orthonormal directions that fc reads most, strongest first, [r, W], in scaled coordinates."""
    width = fc_HW.shape[1] // len(moments.inverse_rms_L)
    scaled_HW = fc_HW.double() / moments.inverse_rms_L.double().repeat_interleave(width)
    second_WW = moments.second_WW.double()
    vectors = torch.linalg.eigh(scaled_HW @ second_WW @ scaled_HW.T)[1][:, -rank:]
    rows_RW = torch.linalg.qr((vectors.T @ scaled_HW).T)[0].T
    turned = torch.linalg.eigh(rows_RW @ second_WW @ rows_RW.T)[1].flip(1)
    found: torch.Tensor = turned.T @ rows_RW
    return found.float()


def _rotate_groups(projection_RW: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Rotate the coordinates inside each group, so that none of them stands out; folded into P."""
    parts = torch.split(projection_RW, list(sizes))
    return torch.cat([Rotation(len(part), seed).forward(part.T).T for seed, part in enumerate(parts)])


def water_fill(energy_R: torch.Tensor, mean_bits: float, group: int = GROUP) -> list[list[int]]:
    """Give each group the bits that lower the summed squared error most, up to `mean_bits` a coordinate on average.

    The error of b bits is taken as energy x 4**-b; groups hold neighbours, strongest first.
    Raises: CodecError when even the fewest bits exceed the budget.
    """
    sizes = [size for size, _ in split_groups(len(energy_R), BITS[0], group)]
    energies = [float(part.sum()) for part in torch.split(energy_R, sizes)]
    chosen = [0] * len(sizes)  # places in BITS
    budget = mean_bits * len(energy_R) - sum(BITS[0] * size for size in sizes)
    if budget < 0:
        raise CodecError(f"at least {BITS[0]} bits a coordinate", f"{mean_bits:g}", "keep fewer directions instead")
    while True:
        gains = []
        for i, place in enumerate(chosen):
            if place + 1 < len(BITS):
                cost = (BITS[place + 1] - BITS[place]) * sizes[i]
                if cost <= budget:
                    gains.append((energies[i] * (4.0 ** -BITS[place] - 4.0 ** -BITS[place + 1]) / cost, -i, cost))
        if not gains:
            return [[size, BITS[place]] for size, place in zip(sizes, chosen, strict=True)]
        _, negative, cost = max(gains)
        chosen[-negative] += 1
        budget -= cost
