"""What a training run will need of memory, before its first step.

In: a drafter's shape, the run's settings and the lengths of its samples. Out: bytes by what they hold, each with the
setting that changes it; or a refusal that names the setting. Counts are of the trainer's own tensors, rounded up: what
Python, PyTorch and the mapped files take beside them is left to the margin.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from headrace.config import TrainConfig
from headrace.drafter.loss import CHUNK_POSITIONS
from headrace.drafter.shape import DrafterShape
from headrace.errors import TrainError
from headrace.target.device import free_bytes

SPARE = 0.1  # share of what is free that is left alone
FLOAT = 4
_GB = 1e9


@dataclass(frozen=True)
class Need:
    """One thing that takes memory: where, how much, and the setting that makes it smaller."""

    what: str
    num_bytes: float
    setting: str
    on_host: bool


def needs(shape: DrafterShape, cfg: TrainConfig, num_parameters: int, longest: int) -> list[Need]:
    """List what a run takes. Args: longest: tokens of the longest sample that is trained on."""
    wide = 2 if cfg.autocast else FLOAT
    tokens = max(cfg.micro_tokens, longest)
    slots = cfg.group_blocks * shape.block_size
    heads = shape.num_heads * shape.head_dim
    keys = 2 * shape.num_kv_heads * shape.head_dim
    copies = 2 + (1 if cfg.optimizer == "muon" else 2) + (2 if cfg.ema else 0)
    kept = num_parameters * FLOAT * copies
    features = tokens * shape.num_features * (FLOAT + wide + 2) if shape.features else 0
    contexts = tokens * (6 * shape.hidden_size + 6 * keys * shape.num_layers) * FLOAT
    # Of each slot and layer: norms in float32 and in the product's dtype, queries, keys, the MLP's three inner tensors.
    block = 8 * shape.hidden_size + 6 * (heads + keys) + 5 * shape.intermediate_size
    scores = shape.num_heads * (longest + shape.block_size) * 5
    blocks = slots * shape.num_layers * (block + scores) * (FLOAT + wide) / 2
    num_rows = shape.draft_vocab_size or shape.vocab_size
    logits = min(CHUNK_POSITIONS, slots) * num_rows * wide * (1 if cfg.objective == "ce" else 2)
    columns = shape.num_features + (0 if cfg.objective == "ce" else shape.hidden_size)
    record = columns * 2 if shape.features else 0
    ahead = 2 * cfg.read_ahead * longest * record
    replayed = (cfg.replay_steps if cfg.draws > 1 else 1) * max(cfg.step_tokens, longest) * record
    return [
        Need("weights, gradients and the optimiser's moments", kept, "drafter.num_layers", False),
        Need("features and contexts of a micro-batch", features + contexts, "train.micro_tokens", False),
        Need("a group of blocks", blocks, "train.group_blocks", False),
        Need("logits of a group", logits, "train.group_blocks", False),
        Need("records read ahead", ahead, "train.read_ahead", True),
        Need("steps in memory", replayed, "train.replay_steps" if cfg.draws > 1 else "train.step_tokens", True),
    ]


def check_memory(found: Iterable[Need], device: torch.device) -> str:
    """Compare what is needed with what is free.

    Returns: the estimate in words.
    Raises: TrainError naming the largest need, and the setting to change, when host or device has too little.
    """
    found = list(found)
    places = {"the host": found} if device.type == "cpu" else {}
    if device.type != "cpu":
        places = {str(device): [n for n in found if not n.on_host], "the host": [n for n in found if n.on_host]}
    told = []
    for place, own in places.items():
        free = free_bytes(torch.device("cpu") if place == "the host" else device)
        needed = sum(n.num_bytes for n in own)
        told.append(f"{needed / _GB:.1f} GB on {place}")
        if free is not None and needed > free * (1 - SPARE):
            largest = max(own, key=lambda n: n.num_bytes)
            raise TrainError(
                f"about {needed / _GB:.1f} GB of memory on {place}",
                f"{free / _GB:.1f} GB free",
                f"lower {largest.setting}: {largest.what} alone take {largest.num_bytes / _GB:.1f} GB",
            )
    return "about " + " and ".join(told)
