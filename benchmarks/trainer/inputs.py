"""One packed batch with weights, which both trainers of the step benchmark read.

In: a run folder with the demo's prepared set, and the target's folder. Out: a safetensors file with the pack's ids,
mask, lengths, tapped states and last state (before the final norm) in bfloat16, sorted anchors for each number asked,
and a drafter's weights by their stock names; its metadata says what shape the drafter has.

An anchor is taken only where all its slots lie inside its sample, are the target's own tokens, and are what the
target's head says from the stored states: then both losses have the same labels.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from headrace.config import DrafterConfig, TargetConfig
from headrace.drafter.derive import derive_shape
from headrace.drafter.model import Drafter
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample
from headrace.taps import Tap, default_taps, parse_tap, to_zlab
from headrace.target.demo import DEMO_MASK_TOKEN_ID
from headrace.target.transformers_target import TransformersTarget, load_target

PACK_TOKENS = 2048
SEED = 0


def write_inputs(run: Path, path: Path, num_layers: int, block_size: int, anchors: list[int]) -> None:
    """Write the file. Raises: SystemExit when the set has too few anchors for one pack."""
    target = load_target(TargetConfig(dtype="float32", device="cpu"))
    taps = default_taps(target.spec.num_blocks, 5)
    samples, states = _pack(PreparedSet.open(run / "prepared"), target, [*taps, parse_tap("final:pre_norm")])
    states_TLH = torch.cat(states).to(torch.bfloat16)
    ids_T = np.concatenate([s.input_ids for s in samples]).astype(np.int64)
    mask_T = np.concatenate([s.loss_mask for s in samples])
    good = _usable(target, states_TLH[:, -1], ids_T, mask_T, [s.num_tokens for s in samples], block_size)
    if len(good) < max(anchors):
        raise SystemExit(f"{max(anchors)} anchors were asked for, the pack has {len(good)}")
    shape = _shape(target, taps, num_layers, block_size)
    tensors = {f"weights/{name}": p.detach() for name, p in Drafter(shape, SEED).named_parameters()}
    tensors |= {
        "ids": torch.from_numpy(ids_T),
        "mask": torch.from_numpy(mask_T),
        "lengths": torch.tensor([s.num_tokens for s in samples]),
        "features": states_TLH[:, :-1].flatten(1).contiguous(),
        "last": states_TLH[:, -1].contiguous(),
    }
    rng = np.random.default_rng(SEED)
    for num in anchors:
        tensors[f"anchors/{num}"] = torch.from_numpy(np.sort(rng.permutation(good)[:num]))
    told = {
        "shape": json.dumps(shape.to_json()),
        "target": str(target.folder),
        "zlab_ids": json.dumps([to_zlab(tap, target.spec.num_blocks) for tap in taps]),
    }
    save_file(tensors, path, metadata=told)


def _pack(
    prepared: PreparedSet, target: TransformersTarget, taps: list[Tap]
) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples up to PACK_TOKENS tokens with their states [T, L, H]."""
    samples: list[Sample] = []
    for row in range(prepared.num_samples):
        sample = prepared.sample(row)
        if sum(s.num_tokens for s in samples) + sample.num_tokens > PACK_TOKENS:
            break
        samples.append(sample)
    return samples, [target.states([s.input_ids], taps, s.num_tokens)[0] for s in samples]


def _usable(
    target: TransformersTarget,
    last_TH: torch.Tensor,
    ids_T: npt.NDArray[np.int64],
    mask_T: npt.NDArray[np.uint8],
    lengths: list[int],
    block_size: int,
) -> npt.NDArray[np.int64]:
    with torch.no_grad():
        said_T = target.model.lm_head(target.model.model.norm(last_TH.float())).argmax(-1).numpy()
    agrees = np.concatenate([[False], said_T[:-1] == ids_T[1:]]) & mask_T.astype(bool)
    found, start = [], 0
    for length in lengths:
        for place in range(start, start + length - block_size + 1):
            if mask_T[place] and agrees[place + 1 : place + block_size].all():
                found.append(place)
        start += length
    edge = len(ids_T) - block_size  # the rival draws no anchor later than this
    return np.array([place for place in found if place < edge], dtype=np.int64)


def _shape(target: TransformersTarget, taps: tuple[Tap, ...], num_layers: int, block_size: int):  # type: ignore[no-untyped-def]
    cfg = DrafterConfig(num_layers=num_layers, block_size=block_size, mask_token_id=DEMO_MASK_TOKEN_ID)
    names = [str(tap) for tap in taps]
    config = AutoConfig.from_pretrained(target.folder)
    return derive_shape(cfg, config, names, len(taps) * target.spec.hidden_size, {})
