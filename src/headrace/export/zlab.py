"""Write a trained drafter as the stock checkpoint that z-lab's code, vLLM and SGLang load, and say how to serve it.

In: a training checkpoint. Out: a folder with `config.json` and `model.safetensors` of exactly the trained tensors in
bfloat16. `fc` is folded with the features' scale and the codec's map in float32 and rounded once, so the served
drafter reads raw taps. No embedding and no head: programs take the target's.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from headrace.codec.base import Codec
from headrace.config import RunFile, RunFolder
from headrace.drafter.model import Drafter
from headrace.errors import ExportError
from headrace.evaluate.stock import CONFIG, WEIGHTS, load_stock, stock_config
from headrace.files import write_atomic, write_json
from headrace.prepare.model_files import load_config
from headrace.progress import Progress
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import target_folder
from headrace.target.weights import weights_hash
from headrace.train.checkpoint import LAST
from headrace.train.load import check_belongs, load_codec, load_drafter, unfinished

load_zlab = load_stock


def stock_tensors(drafter: Drafter, codec: Codec | None = None) -> dict[str, torch.Tensor]:
    """The trained tensors by their stock names, bfloat16, with features scale and codec folded into `fc`.

    Args: codec: the one that made the features; None where features are the raw taps.
    Raises: ExportError for a drafter that reads no states, and for a tensor that is not finite.
    """
    if not drafter.shape.features:
        raise ExportError(
            "a drafter that reads the target's states", "the no-features floor", "export the drafter of `train`"
        )
    tensors = {name: tensor.detach().float() for name, tensor in drafter.named_parameters()}
    fc_HF = tensors["fc.weight"] * drafter.feature_scale.detach().float()
    tensors["fc.weight"] = fc_HF if codec is None else codec.fold(fc_HF)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ExportError("finite weights", f"NaN or infinity in {name}", "train again from an earlier checkpoint")
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def export_zlab(
    drafter: Drafter,
    folder: Path,
    codec: Codec | None = None,
    special_ids: Mapping[str, Any] | None = None,
    scales: Mapping[str, float] | None = None,
) -> None:
    """Write the stock folder.

    `config.json` is removed first and written last: a folder that has one is whole. What was written is read back
    and compared tensor by tensor before that.
    Raises: ExportError (see `stock_tensors`), also if what lies on disk is not what was trained.
    """
    tensors = stock_tensors(drafter, codec)
    config = stock_config(drafter.shape, special_ids or {}, scales or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_atomic(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    written = load((folder / WEIGHTS).read_bytes())
    if written.keys() != tensors.keys() or any(not torch.equal(written[name], tensors[name]) for name in tensors):
        raise ExportError(
            "the trained tensors on disk", f"others in {folder / WEIGHTS}", "check the disk, export again"
        )
    write_json(folder / CONFIG, config)


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


def export_run(cfg: RunFile, folder: RunFolder, progress: Progress) -> dict[str, Any]:
    """Export a run's last checkpoint, the one that is evaluated, to `drafter/` and say how to serve it.

    Returns: folder, step and τ of the checkpoint, bytes, and the commands by engine.
    Raises: TrainError without a checkpoint; ExportError as `export_zlab`.
    """
    drafter, extras = load_drafter(folder.train() / LAST)
    if not drafter.shape.features:
        raise ExportError("a drafter that reads the target's states", "the no-features floor", "train with features")
    model = target_folder(cfg.target.model)
    check_belongs(extras, weights_hash(model), None)
    if (how_far := unfinished(folder.train())) is not None:
        progress.note(f"export: the training has not ended, it {how_far}")
    config = load_config(model)
    text = config.get_text_config()
    ids = {key: getattr(text, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(text, key)}
    codec = load_codec(folder.train() / LAST, extras)
    export_zlab(drafter, folder.export, codec, ids, stock_scales(load_head(model, config)))
    target = str(model) if cfg.target.model == "demo" else cfg.target.model
    commands = serve_commands(target, folder.export, drafter.shape.block_size)
    for engine, command in commands.items():
        progress.note(f"export: {engine}: {command}")
    num_bytes = (folder.export / WEIGHTS).stat().st_size
    return {
        "folder": str(folder.export),
        "step": extras["step"],
        "tau": extras["tau"],
        "bytes": num_bytes,
        "commands": commands,
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
