"""A trained drafter, back from its checkpoint.

In: a checkpoint folder (`train/best`, `train/last`). Out: the drafter, with the averaged weights where the run keeps
some, and what it was made from. Needs neither the store nor the target.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.codec.base import Codec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.drafter.draft_vocabulary import draft_ids
from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.errors import DrafterError, TrainError
from headrace.files import read_stage
from headrace.train.checkpoint import LAST, load_checkpoint, read_state


def check_belongs(extras: Mapping[str, Any], weights_hash: str, prepared: str | None) -> None:
    """Refuse to judge or serve a drafter with another target, or on a set it may have been trained on.

    Args: prepared: fingerprint of the set whose held-out prompts are used; None where none are.
    Raises: TrainError naming what differs.
    """
    trained_for = extras["target"]["weights_hash"]
    if trained_for != weights_hash:
        raise TrainError(
            f"the target the drafter was trained for (weights {trained_for})",
            f"weights {weights_hash}",
            "set target.model to the model whose states were captured",
        )
    if prepared is not None and extras["prepared"] != prepared:
        raise TrainError(
            f"the prepared set the drafter was trained on ({extras['prepared']})",
            f"{prepared}, whose held-out prompts it may have been trained on",
            "train on this set, or evaluate an exported folder with --drafter",
        )


def unfinished(train_folder: Path) -> str | None:
    """In words, how far a training has come that has not ended; None for one that has, or was never begun."""
    stage = read_stage(train_folder)
    if stage is None or stage["finished"]:
        return None
    state = read_state(train_folder / LAST)
    return f"stopped after step {state.step} of {state.num_steps}"


def load_codec(checkpoint_folder: Path, extras: Mapping[str, Any]) -> Codec:
    """The codec whose coordinates a checkpoint's drafter reads; its basis lies beside the checkpoints."""
    return open_codec(CodecSpec.from_json(extras["codec"]), checkpoint_folder.parent)


def as_served(drafter: Drafter, codec: Codec) -> Drafter:
    """The same drafter reading raw taps, as engines hand them out: codec and feature scale folded into fc, float32."""
    fc_HW = codec.fold(drafter.fc.weight.detach() * drafter.feature_scale)
    # Not the codec's own width: a store may hold a last state besides, which no drafter reads.
    shape = replace(drafter.shape, num_features=fc_HW.shape[1])
    served = Drafter(shape)
    weights = {**drafter.state_dict(), "fc.weight": fc_HW}
    weights["feature_scale"] = torch.ones(shape.num_features)
    served.load_state_dict(weights)
    return served.eval()


def load_drafter(checkpoint_folder: Path) -> tuple[Drafter, dict[str, Any]]:
    """Load a drafter in float32 on the CPU, in evaluation mode.

    Returns: the drafter, and a mapping with `step`, `tau` (held-out, may be None), `shape`, `features`, `codec` (a
    CodecSpec's JSON, None for the floor), `prepared` (fingerprint) and `target` (`model`, `weights_hash`).
    Raises: TrainError for a checkpoint that is absent, damaged or does not fit its own shape.
    """
    checkpoint = load_checkpoint(checkpoint_folder, with_moments=False)
    made_from = checkpoint.state.made_from
    drafter = Drafter(DrafterShape.from_json(made_from["shape"]))
    try:
        drafter.load_state_dict({**checkpoint.weights, **checkpoint.average})
    except RuntimeError as exc:
        raise TrainError("weights of the checkpoint's own shape", str(exc), "use the headrace that wrote it") from exc
    try:
        draft_ids(drafter)
    except DrafterError as exc:
        raise TrainError(*exc.args) from exc
    return drafter.eval(), {"step": checkpoint.state.step, "tau": checkpoint.state.tau, **made_from}
