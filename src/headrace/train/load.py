"""A trained drafter, back from its checkpoint.

In: a checkpoint folder (`train/best`, `train/last`). Out: the drafter, with the averaged weights where the run keeps
some, and what it was made from. Needs neither the store nor the target.
"""

from pathlib import Path
from typing import Any

from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.errors import TrainError
from headrace.train.checkpoint import load_checkpoint


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
    return drafter.eval(), {"step": checkpoint.state.step, "tau": checkpoint.state.tau, **made_from}
