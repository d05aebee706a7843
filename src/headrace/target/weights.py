"""A target's safetensors files: which tensor lies where, and a hash over all of them.

In: a model folder, one file or sharded with an index. Out: single tensors by key, without loading the model, and one
content-derived hash. Raises only TargetError.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from headrace.errors import TargetError
from headrace.prepare.model_files import check_json

INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 16 * 1024 * 1024


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index names, else all.

    Raises: TargetError when there are none, or the index names one that is absent.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted({str(name) for name in check_json(index)["weight_map"].values()})
        except (KeyError, AttributeError) as exc:
            raise TargetError(f"an index with a weight_map in {index}", repr(exc), "download the model again") from exc
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise TargetError(f"all {len(names)} files that {INDEX} names", f"no {', '.join(absent)}", "download them")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        here = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise TargetError(
            f"weights as *.safetensors in {folder}", here or "an empty folder", "give the folder of a whole model"
        )
    return found


def weights_hash(folder: Path) -> str:
    """Hash names and bytes of all weight files: xxh3-128, hexadecimal; reads at the disk's speed."""
    hasher = xxhash.xxh3_128()
    for path in weight_files(folder):
        hasher.update(path.name.encode())
        try:
            with open(path, "rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    hasher.update(chunk)
        except OSError as exc:
            raise TargetError(f"a readable {path}", str(exc), "check the file") from exc
    return hasher.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as exc:
        raise TargetError(f"a readable {path}", str(exc), "download the file again") from exc


class Weights:
    """Tensors of a model folder by key."""

    def __init__(self, folder: Path) -> None:
        """Read the headers alone. Raises: TargetError for no files or damaged ones."""
        self.folder = folder
        self._where: dict[str, Path] = {}
        for path in weight_files(folder):
            with _opened(path) as opened:
                self._where.update(dict.fromkeys(opened.keys(), path))

    @property
    def where(self) -> Mapping[str, Path]:
        """File of each key."""
        return self._where

    def find(self, candidates: Sequence[str]) -> str | None:
        """The first key of these that exists."""
        return next((key for key in candidates if key in self._where), None)

    def read(self, candidates: Sequence[str], what: str) -> torch.Tensor:
        """The tensor under the first key that exists, on the CPU, in its own dtype.

        Raises: TargetError listing what was looked for, and keys that look alike.
        """
        key = self.find(candidates)
        if key is None:
            last = candidates[0].split(".")[-2]
            alike = [k for k in sorted(self._where, key=lambda k: (len(k), k)) if last in k][:5]
            raise TargetError(
                f"the {what} in {self.folder} under one of {', '.join(candidates)}",
                f"{', '.join(alike) or 'nothing alike'} among {len(self._where)} tensors",
                "this layout is not known yet; open an issue with the model's name",
            )
        with _opened(self._where[key]) as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
        return tensor
