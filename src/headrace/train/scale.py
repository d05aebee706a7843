"""The fixed scale of features: one over the RMS of the tap each belongs to.

In: the features of a fixed set of training rows. Out: `feature_scale` float32 [F], which a drafter keeps as a buffer
and its export folds into `fc`. Deep taps have far larger norms than early ones; without this they drown them. The
coordinates of a latent have one scale together: their taps were scaled before they were mixed.
"""

import itertools
from collections.abc import Iterator

import torch

from headrace.errors import TrainError
from headrace.prepare.prepared import PreparedSet
from headrace.source import Hole, Position
from headrace.train.batches import Reader

SCALE_SAMPLES = 32


def measure_feature_scale(
    reader: Reader, prepared: PreparedSet, num_scales: int, num_samples: int = SCALE_SAMPLES
) -> torch.Tensor:
    """Measure over the first `num_samples` rows that are not held out and have states.

    Token 0 of each sample is left out: it is the attention sink, whose activations are hundreds of times larger. So is
    what no anchor reads, stored or not, so that a store's token rule does not move the scale.
    Returns: float32 [F].
    Raises: TrainError when there is nothing to measure or a tap is zero everywhere.
    """
    squares = torch.zeros(num_scales, dtype=torch.float64)
    num_tokens = num_features = 0
    for features_TF in itertools.islice(_features(reader, prepared), num_samples):
        num_features = features_TF.shape[1]
        if num_features % num_scales:
            raise TrainError(f"features that split into {num_scales} taps", str(num_features), "check the codec's spec")
        taps_TLH = features_TF.double().view(len(features_TF), num_scales, num_features // num_scales)
        squares += taps_TLH.square().mean(dim=2).sum(dim=0)
        num_tokens += len(features_TF)
    rms_L = (squares / max(num_tokens, 1)).sqrt()
    if not num_tokens or bool((rms_L == 0).any()):
        raise TrainError(
            "states to measure a scale on in every tap",
            f"{num_tokens} tokens with tap RMS {rms_L.tolist()}",
            "capture again; taps that are zero everywhere were not captured",
        )
    return rms_L.reciprocal().float().repeat_interleave(num_features // num_scales)


def _features(reader: Reader, prepared: PreparedSet) -> Iterator[torch.Tensor]:
    positions = (
        Position(0, place, row, prepared.sample_id(row))
        for place, row in enumerate(r for r in range(prepared.num_samples) if not prepared.heldout[r])
    )
    for item in reader.read(positions):
        if not isinstance(item, Hole):
            yield item.features_TF[max(1, item.start) :]
