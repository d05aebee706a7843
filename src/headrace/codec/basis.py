"""What a fitted codec needs beside its spec: the map P, scales and offset, in one safetensors file.

In: tensors from a fit. Out: `basis.safetensors`, whose digest the spec names; loading another file is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from headrace.errors import CodecError
from headrace.files import write_atomic

FILE_NAME = "basis.safetensors"


@dataclass(frozen=True, eq=False)
class Basis:
    """A fit, float32.

    `inverse_rms_L`: one over the RMS of each tap; `projection_RW` [r, L*H] acts on states so scaled, None for a codec
    that only rotates; `offset_F`: subtracted from coordinates before they are quantised, added again after;
    `escape_norm`: a token whose scaled state is longer is kept in 16 bits, None for no escapes. `told` says what it was
    fitted on.
    """

    inverse_rms_L: torch.Tensor
    offset_F: torch.Tensor
    projection_RW: torch.Tensor | None = None
    escape_norm: float | None = None
    told: Mapping[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Basis":
        """The same on another device, once, so that no piece that is encoded there takes the map along."""
        return replace(
            self,
            inverse_rms_L=self.inverse_rms_L.to(device),
            offset_F=self.offset_F.to(device),
            projection_RW=None if self.projection_RW is None else self.projection_RW.to(device),
        )

    def to_bytes(self) -> bytes:
        """The file's content."""
        tensors = {"inverse_rms": self.inverse_rms_L, "offset": self.offset_F}
        if self.projection_RW is not None:
            tensors["projection"] = self.projection_RW
        told = {"escape_norm": json.dumps(self.escape_norm), "told": json.dumps(dict(self.told))}
        return _ordered(save({name: t.float().contiguous() for name, t in tensors.items()}, metadata=told))

    def save(self, folder: Path) -> str:
        """Write the file atomically. Returns: its digest."""
        content = self.to_bytes()
        write_atomic(folder / FILE_NAME, content)
        return digest(content)


def _ordered(content: bytes) -> bytes:
    """A safetensors file with the keys of its header in order: its writer leaves those of the metadata to chance."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[end:]


def digest(content: bytes) -> str:
    """xxh3-128 in hex."""
    return str(xxhash.xxh3_128_hexdigest(content))


def load_basis(folder: Path, expected: str) -> Basis:
    """Read the basis of a folder. Raises: CodecError when it is absent, damaged or another than the spec names."""
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise CodecError(f"the fitted basis {path}", str(exc), "copy it from where the codec was fitted") from exc
    found = digest(content)
    if found != expected:
        raise CodecError(f"{path} with digest {expected}", found, "the states were encoded with another basis")
    try:
        tensors = load(content)
        with safe_open(str(path), "pt") as file:
            told = file.metadata()
        return Basis(
            tensors["inverse_rms"],
            tensors["offset"],
            tensors.get("projection"),
            json.loads(told["escape_norm"]),
            json.loads(told["told"]),
        )
    except (SafetensorError, KeyError, ValueError) as exc:
        raise CodecError(f"a basis in {path}", str(exc), "fit the codec again") from exc
