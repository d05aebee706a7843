"""speculators' own reader and `datasets`' own writer, run in their environment.

usage: speculators_side.py read FOLDER OUT.pt | write SAMPLES.pt FOLDER
"""

import sys
from pathlib import Path


def read(folder: Path, out: Path) -> None:
    """Every sample as their trainer's data set gives it."""
    import torch
    from speculators.data_generation.offline import (
        check_hidden_states,
        find_corrupt_hidden_state_indices,
        get_existing_hidden_state_indices,
    )
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(max_len=4096, datapath=str(folder), on_missing="raise")
    numbers = get_existing_hidden_state_indices(folder / "hidden_states")
    assert numbers == list(range(len(dataset))), numbers
    assert not find_corrupt_hidden_state_indices(folder / "hidden_states", numbers)
    found = []
    for number in numbers:
        check_hidden_states(dataset.transfer.get_cached(number), dataset.data[number]["input_ids"].tolist())
        sample = dataset[number]
        assert isinstance(sample, dict), sample
        found.append({key: value for key, value in sample.items() if isinstance(value, torch.Tensor)})
    torch.save({"samples": found, "lengths": dataset.approx_lengths}, out)


def write(samples: Path, folder: Path) -> None:
    """A data set and files of states as their pipeline leaves them."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file

    rows = torch.load(samples, weights_only=True)
    columns = {name: [row[name].tolist() for row in rows] for name in ("input_ids", "loss_mask")}
    dataset = Dataset.from_dict({**columns, "seq_len": [len(ids) for ids in columns["input_ids"]]})
    dataset.set_format("torch")
    dataset.save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for number, row in enumerate(rows):
        tensors = {"hidden_states": row["states"].contiguous(), "token_ids": row["input_ids"].long()}
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
