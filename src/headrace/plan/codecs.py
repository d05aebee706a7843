"""What a token weighs under each codec, the planned ones included.

In: a codec's name as a person writes it, taps and hidden size. Out: payload bytes of one token with the formula, what
is known about its loss, and whether this version can write it. `raw` asks the codec room; the others are the sizes of
their layout until that room has them, and then agree with it.
"""

import re
from dataclasses import dataclass

from headrace.codec.spec import DTYPE_BYTES, CodecSpec
from headrace.errors import CodecError, PlanError
from headrace.plan.quantity import Figure

GROUP = 128  # coordinates that share one float16 scale
LOSSLESS_RATIO = 1.45  # measured 1.33 to 1.5 on bfloat16 elsewhere; the ceiling by exponent entropy is about 1.51
# What one segment costs beside its payload: Arrow message (736), index row in the shard (80) and in the journal (104).
SEGMENT_OVERHEAD_BYTES = 920
TOKEN_OVERHEAD_BYTES = 5  # int32 id and uint8 mask
SEGMENT_BYTES = 8 * 1024 * 1024
_NAME = re.compile(r"(raw|lossless|fp8)|rotated:([2-8])|latent:(\d+)x([2-8])")
KNOWN = "raw, lossless, fp8, rotated:B (B bits a coordinate) and latent:RxB (R coordinates of B bits)"


@dataclass(frozen=True)
class CodecSize:
    """A codec as the planner sees it; `loss` ranks how much it may cost (0 none), `evidence` says who showed what.

    `num_features` is what the trainer reads of a token.
    """

    name: str
    bytes_per_token: Figure
    loss: int
    evidence: str
    num_features: int
    available: bool

    @property
    def value(self) -> float:
        """Payload bytes of one token."""
        return self.bytes_per_token.value


def codec_size(name: str, num_taps: int, hidden_size: int, dtype: str = "bfloat16") -> CodecSize:
    """Size a codec for a target. Raises: PlanError for an unknown name, and for more coordinates than there are."""
    match = _NAME.fullmatch(name.strip().lower())
    if match is None:
        raise PlanError(f"a codec: {KNOWN}", repr(name), "see docs/plan.md")
    width = num_taps * hidden_size
    plain, rotated_bits, rank, latent_bits = match.groups()
    if plain:
        return _plain(plain, num_taps, hidden_size, dtype)
    if rotated_bits:
        figure = _quantised(width, int(rotated_bits), f"{num_taps} taps x {hidden_size}")
        return _size(
            name,
            figure,
            3 if int(rotated_bits) >= 4 else 6,
            "rotations keep 4 to 8 bits in KV caches; untried on drafters",
            width,
        )
    if not 1 <= int(rank) <= width:
        raise PlanError(
            f"1 to {width} coordinates (taps x hidden size)", rank, "a latent has no more than the raw states"
        )
    figure = _quantised(int(rank), int(latent_bits), f"{rank} coordinates")
    few, coarse = int(rank) < hidden_size, int(latent_bits) < 8
    evidence = "a DFlash fc has rank <= hidden size; which directions matter is fitted, and untried at this size"
    return _size(name, figure, 4 + few + coarse, evidence, int(rank))


def default_codecs(hidden_size: int) -> tuple[str, ...]:
    """The codecs a plan compares, gentlest first."""
    return (
        "raw",
        "lossless",
        "fp8",
        "rotated:4",
        f"latent:{hidden_size}x8",
        f"latent:{hidden_size}x4",
        f"latent:{hidden_size // 2}x4",
    )


def framing_bytes(num_samples: float, num_tokens: float, bytes_per_token: float) -> Figure:
    """What a store adds to the payload: ids, masks, segments and their index rows."""
    per_segment = max(1, int(SEGMENT_BYTES // bytes_per_token)) if bytes_per_token else 1
    segments = num_samples * max(1, -(-round(num_tokens / num_samples) // per_segment))
    value = num_tokens * TOKEN_OVERHEAD_BYTES + segments * SEGMENT_OVERHEAD_BYTES
    formula = (
        f"{num_tokens:,.0f} tokens x {TOKEN_OVERHEAD_BYTES} B + {segments:,.0f} segments x {SEGMENT_OVERHEAD_BYTES} B"
    )
    return Figure(value, "B", formula)


def _plain(name: str, num_taps: int, hidden_size: int, dtype: str) -> CodecSize:
    width = num_taps * hidden_size
    if dtype not in DTYPE_BYTES:
        raise PlanError(
            f"a dtype among {', '.join(DTYPE_BYTES)}", dtype, "states are stored as the target computes them"
        )
    formula = f"{num_taps} taps x {hidden_size} x {DTYPE_BYTES[dtype]} B"
    raw = CodecSpec("raw", 0, num_taps, hidden_size, dtype).bytes_per_token()
    if name == "raw":
        return _size(name, Figure(raw, "B/token", formula), 0, "the states themselves", width)
    if name == "lossless":
        figure = Figure(raw / LOSSLESS_RATIO, "B/token", f"{formula} / {LOSSLESS_RATIO:g} (1.4 to 1.5 seen)", True)
        return _size(name, figure, 0, "the same bits back", width)
    figure = Figure(width + 4.0 * num_taps, "B/token", f"{num_taps} taps x ({hidden_size} x 1 B + one 4 B scale)")
    return _size(name, figure, 2, "within noise for EAGLE-3 in a public comparison", width)


def _quantised(coordinates: int, bits: int, what: str) -> Figure:
    """`bits` a coordinate; at 8 bits one float32 scale a token, below a float16 scale for every GROUP coordinates."""
    payload = coordinates * bits / 8
    if bits == 8:
        return Figure(payload + 4, "B/token", f"{what} x 8 bits / 8 + one 4 B scale")
    groups = -(-coordinates // GROUP)
    return Figure(payload + 2 * groups, "B/token", f"{what} x {bits} bits / 8 + {groups} scales x 2 B")


def _size(name: str, figure: Figure, loss: int, evidence: str, num_features: int) -> CodecSize:
    return CodecSize(name.strip().lower(), figure, loss, evidence, num_features, _available(name))


def _available(name: str) -> bool:
    """Whether the codec room of this version knows a codec of this name."""
    try:
        CodecSpec(name.partition(":")[0], 0, 1, 1, "bfloat16").bytes_per_token()
    except CodecError:
        return False
    return True
