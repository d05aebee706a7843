"""speculators 0.9.0's training step, on its best CPU path: sdpa attention and the eager loss.

Run with the Python of an environment that has speculators; imports nothing of headrace. The anchors are those of the
inputs instead of its own random draw, the optimiser is AdamW as its trainer builds it; nothing else is changed. As a
worker of the step benchmark it repeats one pack; as an arm of the paired comparison (`rival_train.py`) it goes through
many.

usage: rival.py INPUTS ANCHORS [bfloat16|float32]
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

warnings.filterwarnings("ignore")


def make_model(told: Mapping[str, str], weights: Mapping[str, Any]) -> Any:
    """Its DFlash drafter for the shape that the inputs name, with their weights."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train.cli import create_transformer_layer_config

    shape, target = json.loads(told["shape"]), told["target"]
    layers = shape["num_layers"]
    layer_config = create_transformer_layer_config(
        verifier_name_or_path=target, num_layers=layers, draft_arch="qwen3", hidden_act="silu", sliding_window=2048,
        full_attention_indices=list(range(layers)),
    )  # fmt: skip
    model = DFlashDraftModel.from_training_args(
        layer_config, verifier_name_or_path=target, draft_vocab_size=shape["vocab_size"],
        block_size=shape["block_size"],
        target_layer_ids=[number + 1 for number in json.loads(told["zlab_ids"])], mask_token_id=shape["mask_token_id"],
        draft_attn_impl="sdpa",
    )  # fmt: skip
    unknown = model.load_state_dict(dict(weights), strict=False).unexpected_keys
    assert not unknown, unknown
    model.train()
    return model


def batch_of(tensors: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """A pack as its collator would hand it over."""
    import torch

    lengths = tensors["lengths"]
    return {
        "hidden_states": tensors["features"][None].to(dtype),
        "verifier_last_hidden_states": tensors["last"][None].to(dtype),
        "input_ids": tensors["ids"][None],
        "loss_mask": tensors["mask"][None].bool(),
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
    }


def make_step(model: Any, lr: float, half: bool) -> Callable[[dict[str, Any], Any, float | None], float]:
    """One step as its trainer makes it: of a batch, its anchors and a learning rate; gives the loss."""
    import torch
    from speculators.models.dflash import core

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)

    def step(batch: dict[str, Any], anchors: Any, rate: float | None = None) -> float:
        keywords, _ = type(model).get_trainer_kwargs(
            loss_fn="ce",
            loss_implementation="eager",
            max_anchors=len(anchors),
            per_position_loss_weight="dpace",
            dpace_alpha=0.5,
        )
        core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
        for group in optimizer.param_groups:
            group["lr"] = lr if rate is None else rate
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            _, loss, _ = model(**batch, **keywords)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss)

    return step


def _worker(path: str, num: str, dtype: str) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from worker import serve

    torch.set_flush_denormal(True)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    half = dtype == "bfloat16"
    weights = {k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")}
    step = make_step(make_model(told, weights), 1e-4, half)
    batch = batch_of(tensors, torch.bfloat16 if half else torch.float32)
    anchors = tensors[f"anchors/{num}"]
    slots = json.loads(told["shape"])["block_size"] - 1
    serve(lambda: (step(batch, anchors, None), len(anchors) * slots))


if __name__ == "__main__":
    _worker(*sys.argv[1:4])
