"""Read samples as speculators 0.9.0 does, in a process of its own environment.

In: a folder with `ids.npy` [N, T] and `hidden_states/hs_{i}.safetensors`; then lines on stdin, each a number of threads
and a JSON list of samples. Out: `ready`, then the seconds that each list took. A sample is what speculators' own
ArrowDataset gives for it: file loaded, ids compared, hidden states and last states apart.

usage: rival.py FOLDER
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from speculators.train.data import ArrowDataset


def main(folder: Path) -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    ids = np.load(folder / "ids.npy")
    table = {"input_ids": list(ids), "loss_mask": list(np.ones_like(ids)), "seq_len": [ids.shape[1]] * len(ids)}
    Dataset.from_dict(table).with_format("torch").save_to_disk(folder / "table")
    (folder / "table" / "hidden_states").symlink_to(folder.resolve() / "hidden_states")
    data = ArrowDataset(max_len=ids.shape[1], datapath=folder / "table", on_missing="raise")
    print("ready", flush=True)
    for line in sys.stdin:
        threads, order = line.split(maxsplit=1)
        samples = json.loads(order)
        with ThreadPoolExecutor(int(threads)) as pool:
            began = time.perf_counter()
            for sample in map(data.__getitem__, samples) if threads == "1" else pool.map(data.__getitem__, samples):
                assert sample["hidden_states"].shape[0] == ids.shape[1]
            print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
