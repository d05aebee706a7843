"""What a codec is called and what it weighs, before anything runs and without torch.

In: a name and parameters. Out: a spec for the manifest, and bytes per token for plans and segments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import CodecError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class CodecSpec:
    """Name, version and parameters of a codec, and the sizes it was made for."""

    name: str
    version: int
    num_taps: int
    hidden_size: int
    dtype: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def bytes_per_token(self) -> float:
        """Payload bytes of one token. Raises: CodecError for a codec this version does not know."""
        if self.name != "raw" or self.dtype not in DTYPE_BYTES:
            found = f"{self.name} in {self.dtype}"
            raise CodecError("codec raw in bfloat16, float16 or float32", found, "upgrade headrace")
        return float(self.num_taps * self.hidden_size * DTYPE_BYTES[self.dtype])

    def to_json(self) -> dict[str, Any]:
        """The manifest's form."""
        return {
            "name": self.name,
            "version": self.version,
            "num_taps": self.num_taps,
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CodecSpec":
        """Read the manifest's form."""
        return cls(**value)
