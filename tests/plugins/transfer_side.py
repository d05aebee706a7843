"""The backend beside their own file backend, in speculators' environment.

usage: transfer_side.py STATES DATA; DATA is an export with states and, as its last sample, one the store does not have
"""

import argparse
import pickle
import sys
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError
from headrace.plugins.speculators import BACKEND, HeadraceBackend


def flags(states: Path | None, **changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    HeadraceBackend.add_train_args(parser)
    own = parser.parse_args([] if states is None else ["--headrace-states", str(states)])
    told = {**vars(own), "target_layer_ids": [1, 3], "on_missing": "raise", **changes}
    return argparse.Namespace(**told)


def refusal(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except HeadraceError as exc:
        return f"{type(exc).__name__}: {exc}"
    raise AssertionError("not refused")


def main(states: Path, data: Path) -> None:
    import torch
    from hs_connectors import FileTransfer, HiddenStatesBackend

    assert HiddenStatesBackend.registry[BACKEND] is HeadraceBackend
    ours = HeadraceBackend.from_train_args(flags(states), str(data))
    files = FileTransfer(data / "hidden_states")
    again = pickle.loads(pickle.dumps(ours))  # a loader process gets it so
    count = len(list((data / "hidden_states").iterdir()))
    for number in range(count):
        own, other, sent = ours.get_cached(number), files.get_cached(number), again.get_cached(number)
        assert own is not None
        assert other is not None
        assert sent is not None
        assert own.keys() == other.keys() == sent.keys()
        for key in own:
            assert own[key].dtype == other[key].dtype
            assert torch.equal(own[key], other[key])
            assert torch.equal(sent[key], other[key])
    assert ours.get_cached(count) is None
    told = refusal(lambda: HeadraceBackend.from_train_args(flags(states, target_layer_ids=[2, 4]), str(data)))
    assert "--target-layer-ids 1 3" in told, told
    told = refusal(lambda: HeadraceBackend.from_train_args(flags(states, target_layer_ids=None), str(data)))
    assert "--target-layer-ids 1 3" in told, told
    told = refusal(lambda: HeadraceBackend.from_train_args(flags(states, on_missing="generate"), str(data)))
    assert "--on-missing raise" in told, told
    assert "--headrace-states" in refusal(lambda: HeadraceBackend.from_train_args(flags(None), str(data)))
    for call in (lambda: ours.get_generated({}), lambda: HeadraceBackend.build_kv_transfer_config(flags(states))):
        assert ConfigError.__name__ in refusal(call)
    (shard,) = (states / "shards").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    damaged = []
    for number in range(count):
        try:
            again.get_cached(number)
        except HeadraceError as exc:
            damaged.append(str(exc))
    assert len(damaged) == 1, damaged
    assert "store repair" in damaged[0], damaged
    print(f"{count} samples alike")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
