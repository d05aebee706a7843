"""SpecForge's offline features for DFlash and DSpark, both ways: `rows_{a}-{b}/data_{i}.ckpt`.

In: a run, or such a folder (`.ckpt.gz` too). Out: the other. A file is a torch dict: `input_ids` [T], `loss_mask` [T],
`hidden_states` [T, taps*H] or [1, T, taps*H] and, for DSpark, `target_last_hidden_states`, after the final norm. It is
loaded with `weights_only`, so it cannot run code. Source: specforge 0.2.0.
"""

import gzip
import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import ConfigError
from headrace.files import write_atomic
from headrace.interchange.incoming import look_through
from headrace.interchange.outgoing import Outgoing
from headrace.progress import Progress
from headrace.taps import FINAL_POST_NORM, to_zlab

GROUP = 2000  # files of one folder
LAST = "target_last_hidden_states"
_NAME = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def export(outgoing: Outgoing, out: Path, progress: Progress, *, final: bool = False) -> dict[str, Any]:
    """Write one file a sample, training samples first.

    Args: final: write the last state too, which DSpark reads and DFlash does not.
    Returns: num_samples, num_heldout (the last ones), target_layer_ids (z-lab's numbers), final.
    Raises: ExportError for a last state that these states do not lead to.
    """
    wanted = FINAL_POST_NORM if final else None
    if wanted is not None:
        outgoing.check_final(wanted, "SpecForge's DSpark")
    ids = [to_zlab(tap, outgoing.num_blocks) for tap in outgoing.feature_taps]
    stage = outgoing.stage(out, "specforge", final=final)
    if stage.state() == "done":
        progress.note("export: done before, kept")
        return stage.summary()
    stage.begin()
    for number, row in outgoing.told(progress, outgoing.rows):
        path = out / file_name(number)
        if path.exists():  # published whole, before a kill
            continue
        sent = outgoing.sent(row, wanted)
        features = {
            "input_ids": torch.from_numpy(sent.sample.input_ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(sent.sample.loss_mask.astype(np.int64)),
            "hidden_states": sent.features_TLH.flatten(1)[None].contiguous(),
        }
        if sent.final_TH is not None:
            features[LAST] = sent.final_TH[None].contiguous()
        content = io.BytesIO()
        torch.save(features, content)
        write_atomic(path, content.getvalue())
    summary = {
        "num_samples": len(outgoing.rows),
        "num_heldout": outgoing.num_heldout,
        "target_layer_ids": ids,
        "final": final,
    }
    stage.finish(summary)
    return summary


def file_name(number: int) -> str:
    """The file of a sample, in its folder."""
    first = number // GROUP * GROUP
    return f"rows_{first}-{first + GROUP}/data_{number}.ckpt"


class SpecforgeFolder:
    """A folder of feature files, looked through: implements `incoming.Peer`; samples in the order of their numbers."""

    kind = "specforge"
    listed: tuple[int, ...] | None = None

    def __init__(self, folder: Path, hidden_size: int, progress: Progress) -> None:
        """Args: hidden_size: the target's, for the files hold all taps side by side.

        Raises: ConfigError for no file, damaged ones, EAGLE-3 features, several shapes, and widths that are no
        multiple of `hidden_size`.
        """
        found = [(int(match[1]), path) for path in folder.rglob("data_*") if (match := _NAME.fullmatch(path.name))]
        if not found:
            raise ConfigError(f"data_*.ckpt in or below {folder}", "none", "give the folder of the hidden states")
        self._paths = [path for _, path in sorted(found)]
        self.hidden_size = hidden_size
        shapes = look_through(len(self), self._look, progress)
        if len(shapes) != 1:
            raise ConfigError(f"taps, dtype and last state alike in all of {folder}", str(sorted(shapes)), "sort them")
        self.num_slots, self.dtype, self.has_final = shapes.pop()

    def __len__(self) -> int:
        return len(self._paths)

    def where(self, number: int) -> str:
        """Its file."""
        return str(self._paths[number])

    def sample(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Ids and mask."""
        raw = _load(self._paths[number])
        ids, mask = (raw[name].flatten().to(torch.int64) for name in ("input_ids", "loss_mask"))
        return ids.numpy().astype(np.int32), mask.numpy().astype(np.uint8)

    def states(self, number: int) -> torch.Tensor:
        """[T, slots, H]."""
        raw = _load(self._paths[number])
        parts = [_two_axes(raw["hidden_states"])] + ([_two_axes(raw[LAST])] if self.has_final else [])
        return torch.cat(parts, 1).view(len(parts[0]), -1, self.hidden_size)

    def _look(self, number: int) -> tuple[int, str, bool]:
        path = self._paths[number]
        raw = _load(path)
        wanted = ("input_ids", "loss_mask", "hidden_states")
        if any(not isinstance(raw.get(name), torch.Tensor) for name in wanted):
            hint = "features of EAGLE-3 (hidden_state, aux_hidden_state) are not read: capture for dflash"
            raise ConfigError(f"tensors {', '.join(wanted)} in {path}", ", ".join(map(str, raw)), hint)
        states, ids = _two_axes(raw["hidden_states"]), raw["input_ids"].flatten()
        shape, last = list(states.shape), raw.get(LAST)
        good = len(shape) == 2 and shape[0] == len(ids) == raw["loss_mask"].numel() and shape[1] > 0
        good = good and shape[1] % self.hidden_size == 0 and states.dtype in _DTYPES
        if last is not None:
            good = good and list(_two_axes(last).shape) == [len(ids), self.hidden_size] and last.dtype == states.dtype
        if not good:
            expected = f"{len(ids)} tokens of a multiple of {self.hidden_size} numbers in {path}"
            raise ConfigError(expected, f"{shape} in {states.dtype}", "give their own --target, or mend the file")
        return shape[1] // self.hidden_size, _DTYPES[states.dtype], last is not None


def _two_axes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _load(path: Path) -> dict[str, Any]:
    """One file; mapped where it is not compressed. Raises: ConfigError for a damaged one, or one that holds code."""
    try:
        if path.suffix == ".gz":
            content = io.BytesIO(gzip.decompress(path.read_bytes()))
            raw = torch.load(content, map_location="cpu", weights_only=True)
        else:
            raw = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as exc:
        found = " ".join(str(exc).split())[:200]
        raise ConfigError(f"tensors in {path}", f"{type(exc).__name__}: {found}", "capture it again") from exc
    if not isinstance(raw, dict):
        raise ConfigError(f"a dict of tensors in {path}", type(raw).__name__, "capture it again")
    return raw
