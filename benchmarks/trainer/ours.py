"""headrace's training step as a worker: one step for each line on stdin, one JSON line for each step.

usage: ours.py INPUTS ANCHORS [bfloat16|float32]
"""

import json
import sys

from worker import serve

if __name__ == "__main__":
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from headrace.config import TrainConfig
    from headrace.drafter.model import Drafter
    from headrace.drafter.shape import DrafterShape
    from headrace.record import Sample, sample_id
    from headrace.target.head import load_head
    from headrace.train.batches import Step, TrainSample
    from headrace.train.optimizer import build_optimizer
    from headrace.train.step import take_step

    path, num, dtype = sys.argv[1], sys.argv[2], sys.argv[3]
    torch.set_flush_denormal(True)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    shape = DrafterShape.from_json(json.loads(told["shape"]))
    from pathlib import Path

    config = AutoConfig.from_pretrained(told["target"])
    half = dtype == "bfloat16"
    head = load_head(Path(told["target"]), config).to("cpu", torch.bfloat16 if half else torch.float32)
    drafter = Drafter(shape, 0)
    drafter.load_state_dict(
        {k.removeprefix("weights/"): v for k, v in tensors.items() if "/" in k and k[0] == "w"}, strict=False
    )
    cfg = TrainConfig(
        autocast=half, optimizer="adamw", lr=1e-4, weight_decay=0.01, loss="dpace", alpha=0.5
    )  # the rival's
    optimizer = build_optimizer(drafter, cfg)
    samples, start = [], 0
    for row, length in enumerate(tensors["lengths"].tolist()):
        part = slice(start, start + length)
        ids, mask = tensors["ids"][part].numpy().astype(np.int32), tensors["mask"][part].numpy()
        own = tensors[f"anchors/{num}"]
        own = own[(own >= start) & (own < start + length)] - start
        samples.append(
            TrainSample(Sample(row, sample_id(ids, mask), ids, mask), tensors["features"][part], own.numpy())
        )
        start += length
    batch = [s for s in samples if len(s.anchors_A)]
    step = Step(0, 0, len(batch), [batch])

    def once() -> tuple[float, int]:
        """One step: loss summed over weighted slots, and supervised slots."""
        found = take_step(drafter, optimizer, head, step, cfg)
        assert found is not None
        return found.loss, found.num_supervised

    serve(once)
