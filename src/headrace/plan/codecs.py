"""What a token weighs under each codec.

In: a codec's name as a person writes it, or the folder of a fitted one; taps and hidden size. Out: payload bytes of one
token with the formula, and what is known about its loss. Sizes are the codec room's own.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.codec.spec import (
    DTYPE_BYTES,
    LOSSLESS_RATIO,
    SCALE_BYTES,
    CodecSpec,
    fitted_spec,
    packed_bytes,
    short_spec,
)
from headrace.errors import CodecError, PlanError
from headrace.plan.quantity import Figure

# What one segment costs beside its payload: Arrow message (736), index row in the shard (80) and in the journal (104).
SEGMENT_OVERHEAD_BYTES = 920
TOKEN_OVERHEAD_BYTES = 5  # int32 id and uint8 mask
SEGMENT_BYTES = 8 * 1024 * 1024
_PLAIN = {
    "raw": (0, "the states themselves"),
    "lossless": (0, "the same bits back"),
    "fp8": (2, "within noise for EAGLE-3 in a public comparison"),
}


@dataclass(frozen=True)
class CodecSize:
    """A codec as the planner sees it; `loss` ranks how much it may cost (0 none), `evidence` says who showed what.

    `num_features` is what the trainer reads of a token; `setting` what `capture.codec` says for it.
    """

    name: str
    bytes_per_token: Figure
    loss: int
    evidence: str
    num_features: int
    setting: str

    @property
    def value(self) -> float:
        """Payload bytes of one token."""
        return self.bytes_per_token.value


def codec_size(name: str, num_taps: int, hidden_size: int, dtype: str = "bfloat16") -> CodecSize:
    """Size a codec for a target, by its name or by the folder it was fitted into.

    Raises: PlanError for an unknown name, for more coordinates than there are, and for a folder without a codec or with
    one that was fitted for other states.
    """
    try:
        spec = short_spec(name, num_taps, hidden_size, dtype)
        value = spec.bytes_per_token()
    except CodecError as exc:
        if name.strip() and _folder(name).is_dir():
            return _fitted_size(name, num_taps, hidden_size, dtype)
        raise PlanError(*exc.args) from exc
    short = name.strip().lower()
    return _sized(spec, value, short, short)


def _fitted_size(setting: str, num_taps: int, hidden_size: int, dtype: str) -> CodecSize:
    try:
        spec = fitted_spec(_folder(setting), num_taps, hidden_size, dtype)
    except CodecError as exc:
        raise PlanError(*exc.args) from exc
    rank = f":{spec.num_features}" if spec.name == "latent" else ""
    return _sized(spec, spec.bytes_per_token(), f"{spec.name}{rank} ({setting})", setting)


def _folder(setting: str) -> Path:
    return Path(os.path.expanduser(setting))  # a Path of its own refuses the home of nobody


def _sized(spec: CodecSpec, value: float, name: str, setting: str) -> CodecSize:
    loss, evidence = _known_loss(spec)
    figure = Figure(value, "B/token", _formula(spec), spec.name == "lossless")
    return CodecSize(name, figure, loss, evidence, spec.num_features, setting)


def _known_loss(spec: CodecSpec) -> tuple[int, str]:
    """How much a codec may cost, and who showed what."""
    if spec.name in _PLAIN:
        return _PLAIN[spec.name]
    bits = min(bits for _, bits in spec.groups)
    if spec.name == "rotated":
        return (3 if bits >= 4 else 6), "rotations keep 4 to 8 bits in KV caches; untried on drafters"
    few, coarse = spec.num_features < spec.hidden_size, bits < 8
    untried = "was fitted for it" if "basis" in spec.parameters else "is fitted, and untried at this size"
    evidence = f"a DFlash fc has rank <= hidden size; which directions matter {untried}"
    return 4 + few + coarse, evidence


def _formula(spec: CodecSpec) -> str:
    states = f"{spec.num_taps} taps x {spec.hidden_size} x {DTYPE_BYTES[spec.dtype]} B"
    if spec.name == "raw":
        return states
    if spec.name == "lossless":
        return f"{states} / {LOSSLESS_RATIO:g} (1.4 to 1.5 seen)"
    if spec.name == "fp8":
        return f"{spec.num_taps} taps x ({spec.hidden_size} x 1 B + one 4 B scale)"
    what = f"{spec.num_features} coordinates" if spec.name == "latent" else f"{spec.num_taps} taps x {spec.hidden_size}"
    return f"{what} x {_bits(spec)} + {len(spec.groups)} scales x {SCALE_BYTES} B{_escapes(spec)}"


def _bits(spec: CodecSpec) -> str:
    kinds = sorted({bits for _, bits in spec.groups})
    if len(kinds) == 1:
        return f"{kinds[0]} bits / 8"
    codes = sum(packed_bytes(size, bits) for size, bits in spec.groups)
    return f"{' or '.join(map(str, kinds))} bits = {codes:,} B"


def _escapes(spec: CodecSpec) -> str:
    share = float(spec.parameters.get("escape_share", 0.0))
    return f" + {share:.4%} of tokens x {4 + 2 * spec.num_features} B" if share else ""


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
