"""speculators 0.9.0's trainer as an arm of the paired comparison: through the packs of a folder, once.

Run with the Python of an environment that has speculators. In: a folder with `step_*.safetensors`,
`weights.safetensors` and `told.json`, as `paired.py` writes it. Out: `at_*.safetensors`, the drafter at the steps asked
for, and on stdout a JSON line for each of these: step, loss, processor seconds of the steps so far.

usage: rival_train.py INPUTS OUT [bfloat16|float32]
"""

import json
import sys
import time
from pathlib import Path

from rival import batch_of, make_model, make_step

if __name__ == "__main__":
    import torch
    from safetensors.torch import load_file, save_file

    inputs, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_flush_denormal(True)
    told = json.loads((inputs / "told.json").read_text())
    weights = load_file(inputs / "weights.safetensors")
    model = make_model(told, weights)
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    step = make_step(model, told["lr"], dtype == "bfloat16")
    out.mkdir(parents=True, exist_ok=True)
    spent = 0.0
    for number, rate in enumerate(told["rates"], 1):
        tensors = load_file(inputs / f"step_{number:05d}.safetensors")
        batch = batch_of(tensors, wide)
        began = time.process_time()
        loss = step(batch, tensors["anchors"], rate)
        spent += time.process_time() - began
        if number in told["points"]:
            made = {name: p.detach().float().contiguous() for name, p in model.named_parameters() if name in weights}
            save_file(made, out / f"at_{number:05d}.safetensors")
            print(json.dumps({"step": number, "loss": loss, "cpu_s": round(spent, 2)}), flush=True)
