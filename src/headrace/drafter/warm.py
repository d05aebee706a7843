"""Warm start: a drafter takes over the weights of another that reads the same taps.

In: a fresh drafter in a codec's coordinates, and one that reads raw taps. Out: the first with the second's weights;
its `fc` moved into the coordinates, so that folding it back gives the other's, and the share that the codec loses.
"""

import torch

from headrace.codec.base import Codec, OfTaps
from headrace.codec.quantised import QuantisedCodec
from headrace.drafter.model import Drafter
from headrace.errors import DrafterError

_ROWS = 4096


@torch.no_grad()
def start_from(drafter: Drafter, start: Drafter, codec: Codec | None) -> float:
    """Copy weights.

    Args: codec: of the fresh drafter's features; None where they are the raw taps.
    Returns: the part of `fc` that the codec's coordinates cannot hold, as a share of its norm, each tap at its own
    scale: 0 for raw taps and rotations, up to 1 for a latent that keeps fewer directions.
    Raises: DrafterError when the shapes differ.
    """
    weights = {name: tensor for name, tensor in start.state_dict().items() if name != "feature_scale"}
    fc_HW = weights.pop("fc.weight").float() * start.feature_scale
    fc_HF = fc_HW if codec is None or isinstance(codec, OfTaps) else _in_coordinates(fc_HW, codec)
    weights["fc.weight"] = fc_HF / drafter.feature_scale.cpu()
    weights["feature_scale"] = drafter.feature_scale.cpu()
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as exc:
        found = " ".join(str(exc).split())[:300]
        raise DrafterError("weights of the same shape", found, "give a drafter of this target and codec") from exc
    back_HW = fc_HF if codec is None else codec.fold(fc_HF)
    rms_W = _tap_rms(fc_HW, codec)
    return float(((back_HW - fc_HW) * rms_W).norm() / (fc_HW * rms_W).norm())


def _tap_rms(fc_HW: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """The scale of each input, as the codec's basis has it; 1 where it has none."""
    if not isinstance(codec, QuantisedCodec) or codec.basis is None:
        return fc_HW.new_ones(fc_HW.shape[1])
    return codec.basis.inverse_rms_L.reciprocal().repeat_interleave(codec.spec.hidden_size)


def _in_coordinates(fc_HW: torch.Tensor, codec: Codec) -> torch.Tensor:
    """fc [H, F] that answers codec features as `fc_HW` [H, L*H] answers the states they stand for."""
    parts = []
    for row in range(0, codec.num_features, _ROWS):
        units = torch.zeros(min(_ROWS, codec.num_features - row), codec.num_features)
        units.diagonal(row).fill_(1.0)
        parts.append(fc_HW @ codec.reconstruct(units).float().flatten(1).T)
    return torch.cat(parts, 1)
