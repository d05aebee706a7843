"""speculators' files, both ways: a saved data set, and `hidden_states/hs_{i}.safetensors` for its sample i.

In: a run, or such a folder. Out: the other. A file holds `hidden_states` [T, taps + 1, H], the last slot the state
before the final norm, and `token_ids` int64 [T]; nothing says of which model or taps. Source: hs-connectors 0.9.0.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from headrace.codec.base import TORCH_DTYPES
from headrace.errors import ConfigError
from headrace.files import write_atomic
from headrace.interchange.arrow_folder import ArrowFolder, write_arrow_folder
from headrace.interchange.incoming import look_through
from headrace.interchange.outgoing import Outgoing
from headrace.progress import Progress
from headrace.taps import FINAL_PRE_NORM, to_speculators

STATES = "hidden_states"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def layer_ids(taps: Outgoing) -> list[int]:
    """What `--target-layer-ids` of speculators calls the feature taps."""
    return [to_speculators(tap, taps.num_blocks) for tap in taps.feature_taps]


def export(outgoing: Outgoing, out: Path, progress: Progress, *, states: bool = True) -> dict[str, Any]:
    """Write a data set, training samples first, and a file of states for each sample.

    Args: states: False writes the data set alone, for `headrace speculators train`.
    Returns: num_samples, num_heldout, target_layer_ids, train_data_ratio (with which its trainer holds out the same
    samples; None where it cannot).
    Raises: ExportError for states without final:pre_norm, which its reader takes from the last slot.
    """
    outgoing.check_final(FINAL_PRE_NORM, "speculators")
    stage = outgoing.stage(out, "speculators", with_states=states)
    if stage.state() == "done":
        progress.note("export: done before, kept")
        return stage.summary()
    stage.begin()
    folder = out / STATES
    folder.mkdir(parents=True, exist_ok=True)
    write_arrow_folder(out, (outgoing.prepared.sample(row) for row in outgoing.rows))
    for number, row in outgoing.told(progress, outgoing.rows) if states else ():
        path = folder / file_name(number)
        if path.exists():  # published whole, before a kill
            continue
        sent = outgoing.sent(row, FINAL_PRE_NORM)
        assert sent.final_TH is not None
        ids = torch.from_numpy(sent.sample.input_ids.astype(np.int64))
        slots = torch.cat([sent.features_TLH, sent.final_TH[:, None]], 1).contiguous()
        write_atomic(path, save({"hidden_states": slots, "token_ids": ids}))
    count, held = len(outgoing.rows), outgoing.num_heldout
    ratio = (count - held + 0.5) / count if 0 < held < count else None
    summary = {
        "num_samples": count,
        "num_heldout": held,
        "target_layer_ids": layer_ids(outgoing),
        "train_data_ratio": ratio,
    }
    stage.finish(summary)
    return summary


def file_name(number: int) -> str:
    """The file of a sample's states."""
    return f"hs_{number}.safetensors"


class SpeculatorsFolder:
    """A data set with its files of states, looked through: implements `incoming.Peer`."""

    kind = "speculators"
    has_final = True
    listed: tuple[int, ...] | None = None

    def __init__(self, folder: Path, progress: Progress, states: Path | None = None) -> None:
        """Args: states: the folder of `hs_{i}.safetensors`, if it is not `hidden_states` in the data set's.

        Raises: ConfigError for files that are missing, damaged, of several shapes, or of other ids than the data set.
        """
        self._data = ArrowFolder(folder)
        self._states = states or folder / STATES
        absent = [number for number in range(len(self)) if not self._path(number).is_file()]
        if absent:
            found = f"{len(absent)} absent, {file_name(absent[0])} first"
            hint = "generate them, or take those samples out of the data set"
            raise ConfigError(f"{len(self)} files of states in {self._states}", found, hint)
        shapes = look_through(len(self), self._look, progress)
        if len(shapes) != 1:
            raise ConfigError(
                f"slots, width and dtype alike in all of {self._states}", str(sorted(shapes)), "sort them"
            )
        slots, self.hidden_size, self.dtype = shapes.pop()
        self.num_slots = slots - 1

    def __len__(self) -> int:
        return len(self._data)

    def where(self, number: int) -> str:
        """Its file."""
        return str(self._path(number))

    def sample(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Ids and mask of the data set."""
        return self._data.sample(number)

    def states(self, number: int) -> torch.Tensor:
        """[T, slots, H]."""
        with safe_open(self._path(number), framework="pt") as opened:
            states: torch.Tensor = opened.get_tensor("hidden_states")
        return states

    def _path(self, number: int) -> Path:
        return self._states / file_name(number)

    def _look(self, number: int) -> tuple[int, int, str]:
        path, ids = self._path(number), self._data.sample(number)[0]
        try:
            with safe_open(path, framework="pt") as opened:
                names = set(opened.keys())
                if names != {"hidden_states", "token_ids"}:
                    hint = "files of the fp8 backend are not read: generate with --hidden-states-backend file"
                    raise ConfigError(f"hidden_states and token_ids in {path}", ", ".join(sorted(names)), hint)
                part = opened.get_slice("hidden_states")
                shape, dtype = part.get_shape(), _DTYPES.get(part.get_dtype())
                same = np.array_equal(opened.get_tensor("token_ids").numpy(), ids)
        except (SafetensorError, OSError) as exc:
            raise ConfigError(f"a readable {path}", str(exc), "generate it again") from exc
        if len(shape) != 3 or shape[0] != len(ids) or shape[1] < 2 or dtype not in TORCH_DTYPES:
            raise ConfigError(f"states [{len(ids)}, 2 or more, H] in 16 or 32 bits in {path}", f"{shape}", "mend it")
        if not same:
            raise ConfigError(f"the ids of sample {number} in {path}", "others", "generate it again")
        return shape[1], shape[2], dtype
