"""What a codec is called and what it weighs, before anything runs and without torch.

In: a name and parameters. Out: a spec for the manifest, and bytes per token for plans and segments. A quantised codec
has groups of coordinates, each with its bits; `rotated:4` and `latent:288x4` are short for the usual choices.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import CodecError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OF_TAPS = ("raw", "lossless", "fp8")
NAMES = ("raw", "lossless", "fp8", "rotated", "latent")
BITS = (2, 3, 4, 5, 6, 8)
GROUP = 128  # coordinates that share a scale, unless fitted otherwise
GROUP_8 = 512  # at 8 bits, where a scale's own bytes would weigh more than what it saves
LOSSLESS_RATIO = 1.45  # expected of bfloat16 states; the ceiling by the entropy of exponents is about 1.51
SCALE_BYTES = 2  # float16
AUTO_SPARE = 1.01  # what `auto` leaves free: sizes of lossless, and of escapes, are what is expected
SPEC_NAME = "codec.json"  # in the folder of a fitted codec
KNOWN = "raw, lossless, fp8, rotated:B (B bits a coordinate) and latent:RxB (R coordinates of B bits)"
_SHORT = re.compile(r"(raw|lossless|fp8)|rotated:(\d+)|latent:(\d+)x(\d+)")


@dataclass(frozen=True)
class CodecSpec:
    """Name, version and parameters of a codec, and the sizes it was made for.

    Parameters of `rotated` and `latent`: `groups`, a list of [coordinates, bits]; `seed` of the rotation; `basis`, the
    digest of the fitted basis; `escape_share`, the share of tokens expected in 16 bits.
    """

    name: str
    version: int
    num_taps: int
    hidden_size: int
    dtype: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """L*H, the numbers of one token's states."""
        return self.num_taps * self.hidden_size

    @property
    def of_taps(self) -> bool:
        """Whether features are the raw taps themselves, however they are stored."""
        return self.name in OF_TAPS

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Coordinates and bits of each group of a quantised codec. Raises: CodecError where the spec has none."""
        if "groups" not in self.parameters:
            raise CodecError(f"groups of coordinates for the codec {self.name}", "none", "fit the codec")
        return [(int(size), int(bits)) for size, bits in self.parameters["groups"]]

    @property
    def num_features(self) -> int:
        """F, the width of what the trainer reads."""
        return sum(size for size, _ in self.groups) if self.name == "latent" else self.width

    def bytes_per_token(self) -> float:
        """Payload bytes of one token; of `lossless`, and of escapes, what is expected.

        Raises: CodecError for a codec or dtype this version does not know.
        """
        if self.name not in NAMES or self.dtype not in DTYPE_BYTES:
            raise CodecError(
                f"a codec among {', '.join(NAMES)}, of states in a dtype among {', '.join(DTYPE_BYTES)}",
                f"{self.name} in {self.dtype}",
                "upgrade headrace",
            )
        raw = float(self.width * DTYPE_BYTES[self.dtype])
        if self.name == "raw":
            return raw
        if self.name == "lossless":
            return raw / LOSSLESS_RATIO
        if self.name == "fp8":
            return float(self.width + 4 * self.num_taps)
        escaped = float(self.parameters.get("escape_share", 0.0)) * (4 + 2 * self.num_features)
        return sum(packed_bytes(size, bits) + SCALE_BYTES for size, bits in self.groups) + escaped

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


def fitted_spec(folder: Path, num_taps: int, hidden_size: int, dtype: str) -> CodecSpec:
    """The spec in the folder of a fitted codec, for states of these sizes.

    Raises: CodecError for a folder that holds none whose bytes can be counted, and for one fitted for other states.
    """
    path, hint = folder / SPEC_NAME, "run headrace codec fit"
    try:
        spec = CodecSpec.from_json(json.loads(path.read_text(encoding="utf-8")))
        sizes = spec.groups if not spec.of_taps else []
        share = float(spec.parameters.get("escape_share", 0.0))
        sound = spec.bytes_per_token() > 0 and 0 <= share <= 1 and all(n >= 1 and bits in BITS for n, bits in sizes)
    except (OSError, ValueError, TypeError, AttributeError, CodecError) as exc:
        raise CodecError(f"a fitted codec in {path}", str(exc), hint) from exc
    if not sound:
        raise CodecError(f"a fitted codec in {path}", f"groups {sizes}, escape_share {share}", hint)
    found, wanted = (spec.num_taps, spec.hidden_size, spec.dtype), (num_taps, hidden_size, dtype)
    if found != wanted:
        raise CodecError(
            f"a codec for {num_taps} taps of {hidden_size} in {dtype}",
            f"{folder} was fitted for {found[0]} taps of {found[1]} in {found[2]}",
            "fit it on states of this run",
        )
    return spec


def packed_bytes(size: int, bits: int) -> int:
    """Bytes of one token's codes in a group."""
    return -(-size * bits // 8)


def split_groups(size: int, bits: int, group: int | None = None) -> list[list[int]]:
    """Cut `size` coordinates into groups of nearly equal size, at most `group` each, all of `bits`."""
    count = -(-size // (group or (GROUP_8 if bits == 8 else GROUP)))
    return [[size // count + (i < size % count), bits] for i in range(count)]


def is_short(text: str) -> bool:
    """Whether a text reads as a short name, and not as a folder."""
    return ":" in text or text.strip().lower() in NAMES


def is_auto(setting: str) -> bool:
    """Whether a codec is yet to be chosen by its size."""
    return setting.strip().lower() == "auto"


def auto_ladder(hidden_size: int) -> tuple[str, ...]:
    """What `auto` chooses from, gentlest first, by what each loses on states (docs/codecs.md)."""
    latents = (f"latent:{hidden_size}x8", f"latent:{hidden_size}x4")
    narrow = (f"latent:{max(1, hidden_size // part)}x4" for part in (2, 4, 8))
    return ("raw", "lossless", "fp8", "rotated:8", "rotated:6", "rotated:4", *latents, *narrow)


def gentlest(hidden_size: int, room: float, size_of: Callable[[str], float]) -> tuple[str, float, bool]:
    """What `auto` is: the first of the ladder whose store fits into `room` bytes, else the last.

    Args: size_of: bytes of a store, by a codec's name. Returns: name, bytes, whether it fits.
    """
    name, size = "", 0.0
    for name in auto_ladder(hidden_size):
        size = size_of(name)
        if size * AUTO_SPARE <= room:
            return name, size, True
    return name, size, False


def is_latent(setting: str) -> bool:
    """Whether a codec is a latent by its short name, whose directions are yet to be fitted."""
    return setting.strip().lower().startswith("latent:")


def short_spec(text: str, num_taps: int, hidden_size: int, dtype: str) -> CodecSpec:
    """The spec that a short name stands for; of `latent`, sizes only: its basis is fitted.

    Raises: CodecError for an unknown name, bits or rank.
    """
    match = _SHORT.fullmatch(text.strip().lower())
    if match is None:
        raise CodecError(f"a codec: {KNOWN}", repr(text), "see docs/codecs.md")
    plain, rotated_bits, rank, latent_bits = match.groups()
    if plain:
        return CodecSpec(plain, 0, num_taps, hidden_size, dtype)
    bits = int(rotated_bits or latent_bits)
    if bits not in BITS:
        raise CodecError(f"{', '.join(map(str, BITS))} bits a coordinate", str(bits), "choose one of them")
    if rotated_bits:
        groups = [pair for _ in range(num_taps) for pair in split_groups(hidden_size, bits)]
        return CodecSpec("rotated", 0, num_taps, hidden_size, dtype, {"groups": groups, "seed": 0})
    if not 1 <= int(rank) <= num_taps * hidden_size:
        raise CodecError(f"1 to {num_taps * hidden_size} coordinates", rank, "a latent has no more than the raw states")
    return CodecSpec("latent", 0, num_taps, hidden_size, dtype, {"groups": split_groups(int(rank), bits)})
