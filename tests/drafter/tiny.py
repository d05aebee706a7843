"""A tiny drafter, a head to go with it, and samples with random features."""

from dataclasses import dataclass

import numpy as np
import torch

from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.record import Sample, sample_id

VOCAB, HIDDEN, FEATURES, BLOCK, MASK = 64, 32, 64, 4, 60


@dataclass(frozen=True, eq=False)
class TinyHead:
    """Frozen ends with random weights, large enough that drafts differ."""

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


def tiny_head(seed: int = 0, **scales: float) -> TinyHead:
    random = torch.Generator().manual_seed(seed)
    draw = [torch.randn(VOCAB, HIDDEN, generator=random) for _ in range(2)]
    return TinyHead(draw[0], draw[1], **scales)  # type: ignore[arg-type]


def tiny_shape(**changes: object) -> DrafterShape:
    values: dict[str, object] = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128, "vocab_size": VOCAB, "block_size": BLOCK, "mask_token_id": MASK,
        "taps": ("after_block:0", "after_block:2"), "num_target_layers": 5, "num_features": FEATURES, "features": True,
    }  # fmt: skip
    return DrafterShape(**{**values, **changes})  # type: ignore[arg-type]


def tiny_drafter(seed: int = 0, **changes: object) -> Drafter:
    """Weights ten times their usual size, so that what a block sees moves what it says."""
    drafter = Drafter(tiny_shape(**changes), seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return drafter.eval()


def tiny_sample(num_tokens: int = 20, prompt: int = 5, seed: int = 0) -> tuple[Sample, torch.Tensor]:
    ids = np.random.default_rng(seed).integers(0, MASK, num_tokens).astype(np.int32)
    mask = (np.arange(num_tokens) >= prompt).astype(np.uint8)
    features = torch.randn(num_tokens, FEATURES, generator=torch.Generator().manual_seed(seed))
    return Sample(seed, sample_id(ids, mask), ids, mask), features


def ids_of(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(sample.input_ids.astype(np.int64))
