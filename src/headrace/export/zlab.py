"""Write a trained drafter as the stock checkpoint that z-lab's code, vLLM and SGLang load, and say how to serve it.

In: a drafter and its codec. Out: a folder with `config.json` and `model.safetensors` of exactly the trained tensors in
bfloat16. `fc` is folded with the features' scale and the codec's map in float32 and rounded once, so the served
drafter reads raw taps. No embedding and no head, but for a reduced vocabulary's rows: programs take the target's.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from headrace.codec.base import Codec
from headrace.drafter.draft_vocabulary import ROWS, draft_ids, mapping
from headrace.drafter.model import Drafter
from headrace.drafter.stock import CONFIG, WEIGHTS, load_stock, stock_config
from headrace.errors import ExportError
from headrace.files import write_atomic, write_json
from headrace.target.head import FrozenHead

load_zlab = load_stock


def stock_tensors(
    drafter: Drafter, codec: Codec | None = None, head: FrozenHead | None = None
) -> dict[str, torch.Tensor]:
    """The trained tensors by their stock names, bfloat16, with features scale and codec folded into `fc`; of a reduced
    vocabulary also its mapping and its rows of the head, which engines do not take from the target.

    Args:
        codec: the one that made the features; None where features are the raw taps.
        head: the target's; needed for a reduced vocabulary.
    Raises: ExportError for a drafter that reads no states, for a tensor that is not finite, and without a head that is
    needed.
    """
    if not drafter.shape.features:
        raise ExportError(
            "a drafter that reads the target's states", "the no-features floor", "export the drafter of `train`"
        )
    tensors = {name: tensor.detach().float() for name, tensor in drafter.named_parameters()}
    fc_HF = tensors["fc.weight"] * drafter.feature_scale.detach().float()
    tensors["fc.weight"] = fc_HF if codec is None else codec.fold(fc_HF)
    ids_D = draft_ids(drafter)
    if ids_D is not None:
        if head is None:
            raise ExportError("the target's head, for a reduced vocabulary's rows", "none", "give the target")
        tensors[ROWS] = head.head_VH.cpu()[ids_D]
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ExportError("finite weights", f"NaN or infinity in {name}", "train again from an earlier checkpoint")
    stock = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    return stock if ids_D is None else {**stock, **mapping(ids_D, drafter.shape.vocab_size)}


def export_zlab(
    drafter: Drafter,
    folder: Path,
    codec: Codec | None = None,
    special_ids: Mapping[str, Any] | None = None,
    scales: Mapping[str, float] | None = None,
    head: FrozenHead | None = None,
) -> None:
    """Write the stock folder.

    `config.json` is removed first and written last: a folder that has one is whole. What was written is read back
    and compared tensor by tensor before that.
    Raises: ExportError (see `stock_tensors`), also if what lies on disk is not what was trained.
    """
    config = stock_config(drafter.shape, special_ids or {}, scales or {})
    write_folder(folder, stock_tensors(drafter, codec, head), config)


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write weights, read them back, and only then write `config.json`. Raises: ExportError if they differ."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS, save(dict(tensors), metadata={"format": "pt"}))
    written = load((folder / WEIGHTS).read_bytes())
    if written.keys() != tensors.keys() or any(not torch.equal(written[name], tensors[name]) for name in tensors):
        raise ExportError(
            "the trained tensors on disk", f"others in {folder / WEIGHTS}", "check the disk, export again"
        )
    write_json(folder / CONFIG, dict(config))


def serve_commands(target: str, drafter_folder: Path, block_size: int) -> dict[str, str]:
    """The commands that serve a target with its drafter, by engine.

    vLLM counts drafted tokens (a block without its anchor), SGLang the whole block.
    """
    speculation = f'{{"method":"dflash","model":"{drafter_folder}","num_speculative_tokens":{block_size - 1}}}'
    return {
        "vllm": (
            f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculation)} "
            "--attention-backend flash_attn --max-num-batched-tokens 32768"
        ),
        "sglang": (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {shlex.quote(str(drafter_folder))} "
            f"--speculative-num-draft-tokens {block_size}"
        ),
    }


def stock_scales(head: FrozenHead) -> dict[str, float]:
    """The keys by which a drafter's config tells engines of a target that scales or caps; none for most targets."""
    scales: dict[str, float] = {}
    if head.embedding_scale != 1.0:
        scales["input_embedding_scale"] = head.embedding_scale
    if head.logit_scale != 1.0:
        scales["output_multiplier"] = head.logit_scale
    if head.softcap is not None:
        scales["final_logit_softcapping"] = head.softcap
    return scales
