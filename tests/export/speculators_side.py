"""An export in speculators' own package: block logits of given features, and the checkpoint as they save it.

usage: speculators_side.py EXPORT INPUTS OUT; INPUTS holds features_TF and ids_T; OUT becomes a folder
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig


def main(export: str, inputs: str, out: str) -> None:
    config = DFlashSpeculatorConfig.from_pretrained(export)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel.from_pretrained(export, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    ids = given["ids_T"][None]
    ones = torch.ones_like(ids)
    torch.manual_seed(0)
    with torch.no_grad():
        _, logits, _, _, places = model._backbone_forward(
            given["features_TF"][None],
            ids,
            ones,
            torch.zeros(1, ids.shape[1], config.transformer_layer_config.hidden_size),
            torch.zeros_like(ids),
            max_anchors=6,
        )
    model.save_pretrained(Path(out) / "checkpoint")
    save_file({"logits": logits[0].contiguous(), "places": places.contiguous()}, Path(out) / "logits.safetensors")


main(*sys.argv[1:])
