"""speculators 0.9.0's training step as a worker, on its best CPU path: sdpa attention and the eager loss.

Run with the Python of an environment that has speculators; imports nothing of headrace. The anchors are those of the
inputs instead of its own random draw, the optimiser is AdamW as its trainer builds it; nothing else is changed.

usage: rival.py INPUTS ANCHORS [bfloat16|float32]
"""

import json
import sys
import warnings

from worker import serve

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from speculators.models.dflash import DFlashDraftModel, core
    from speculators.train.cli import create_transformer_layer_config

    path, num, dtype = sys.argv[1], sys.argv[2], sys.argv[3]
    torch.set_flush_denormal(True)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
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
    weights = {k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")}
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    keywords, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager",
        max_anchors=int(num),
        per_position_loss_weight="dpace",
        dpace_alpha=0.5,
    )
    anchors = tensors[f"anchors/{num}"]
    core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    lengths = tensors["lengths"]
    half = dtype == "bfloat16"
    wide = torch.bfloat16 if half else torch.float32
    batch = {
        "hidden_states": tensors["features"][None].to(wide),
        "verifier_last_hidden_states": tensors["last"][None].to(wide),
        "input_ids": tensors["ids"][None],
        "loss_mask": tensors["mask"][None].bool(),
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01)
    model.train()

    def once() -> tuple[float, int]:
        """One step as its trainer makes it."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            _, loss, _ = model(**batch, **keywords)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss), len(anchors) * (shape["block_size"] - 1)

    serve(once)
