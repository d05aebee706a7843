"""The shape of a drafter: everything that fixes its tensors and its arithmetic.

In: fields, from a target (`drafter.derive`), a checkpoint or another program's config. Out: one frozen shape that
builds the model, is saved with every checkpoint and becomes the export's config. What engines would compute otherwise
than the trainer did is refused here, wherever it comes from.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, NamedTuple

from headrace.errors import DrafterError

FULL, SLIDING = "full_attention", "sliding_attention"
# A drafter turns whole heads by one position each; engines load nothing else.
_REFUSED_ROPE = ("mrope_section", "mrope_interleaved")
# The frequencies of other kinds depend on a text's length, so keys that lie in a cache would be wrong later on.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class Window(NamedTuple):
    """What a sliding layer sees: less than `size` tokens back, and as far ahead in its block unless it is `causal`."""

    size: int
    causal: bool


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and its arithmetic.

    `rope` is the target's `rope_parameters`; `taps` are names in column order; `num_features` is the width F of what
    the codec hands out; `features` is False for the floor, whose blocks see no target state. `layer_types` (none given:
    full attention everywhere) says which layers see only what lies less than `sliding_window` tokens away, and with
    `sliding_causal` nothing of what stands later in their block.
    `draft_vocab_size` and `draft_vocab_hash` are those of a reduced vocabulary's mapping, None for the whole one.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    taps: tuple[str, ...]
    num_target_layers: int
    num_features: int
    hidden_act: str = "silu"
    features: bool = True
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    sliding_causal: bool = False
    draft_vocab_size: int | None = None
    draft_vocab_hash: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise DrafterError(
                "num_heads divisible by num_kv_heads",
                f"{self.num_heads} and {self.num_kv_heads}",
                "set drafter.num_heads and drafter.num_kv_heads together, or neither",
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterError(
                f"a mask token from 0 to {self.vocab_size - 1}",
                str(self.mask_token_id),
                "the mask token needs a row of the target's embedding; choose an unused special token",
            )
        if self.block_size < 2:
            raise DrafterError("a block of at least 2 tokens", str(self.block_size), "raise drafter.block_size")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {FULL, SLIDING}:
            raise DrafterError(
                f"{self.num_layers} layer types, each {FULL} or {SLIDING}",
                str(list(self.layer_types)),
                "set drafter.layer_types, one for each of drafter.num_layers",
            )
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise DrafterError(
                "a window for sliding layers, and sliding layers for a window",
                f"drafter.sliding_window {self.sliding_window} with {', '.join(self.layer_types)}",
                "set drafter.sliding_window and drafter.layer_types together",
            )
        if self.sliding_causal and self.sliding_window is None:
            raise DrafterError(
                "sliding layers for sliding_causal",
                ", ".join(self.layer_types),
                "set drafter.layer_types, or leave it out",
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise DrafterError(
                f"a draft vocabulary smaller than the target's {self.vocab_size}",
                str(self.draft_vocab_size),
                "set drafter.draft_vocabulary so, or leave it out",
            )
        _check_rope(self.rope)
        if self.hidden_act != "silu":
            raise DrafterError("hidden_act silu", self.hidden_act, "engines run a drafter's MLP with silu only")

    def window(self, layer: int) -> Window | None:
        """The window of a layer; None for full attention."""
        if self.layer_types[layer] != SLIDING or self.sliding_window is None:
            return None
        return Window(self.sliding_window, self.sliding_causal)

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's form: JSON values only."""
        lists = {"taps": list(self.taps), "layer_types": list(self.layer_types)}
        own = {**asdict(self), "rope": dict(self.rope), **lists}
        # Checkpoints without them stay as earlier releases wrote them.
        later = {"draft_vocab_size": None, "draft_vocab_hash": None, "sliding_causal": False}
        return {key: value for key, value in own.items() if key not in later or value != later[key]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "DrafterShape":
        """Read the checkpoint's form. Raises: DrafterError naming missing or unknown fields."""
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING}
        if not needed <= set(value) <= known:
            raise DrafterError(
                "a drafter's shape with every field of this version",
                f"missing {sorted(needed - set(value))}, unknown {sorted(set(value) - known)}",
                "load the checkpoint with the release that wrote it",
            )
        tuples = {name: tuple(value[name]) for name in ("taps", "layer_types") if name in value}
        return cls(**{**value, **tuples, "rope": dict(value["rope"])})


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Refuse what is silent when wrong: no base, part of a head, several axes, a kind that changes with length."""
    if "rope_theta" not in rope or "rope_type" not in rope:
        raise DrafterError(
            "rope_parameters with rope_theta and rope_type",
            repr(dict(rope)),
            "a drafter with another RoPE than it was trained with is accepted by nobody and noticed by nobody; "
            "write the target's own into its config.json",
        )
    partial = rope.get("partial_rotary_factor", 1.0)
    refused = [key for key in _REFUSED_ROPE if rope.get(key)]
    if refused or partial != 1.0:
        raise DrafterError(
            "one rotary embedding over whole heads",
            f"partial_rotary_factor {partial}, {', '.join(refused) or 'no M-RoPE'}",
            "engines give a drafter one position a token and turn whole heads; train one without these keys",
        )
    if rope["rope_type"] not in ROPE_KINDS:
        raise DrafterError(
            f"a rope_type of {', '.join(ROPE_KINDS)}",
            str(rope["rope_type"]),
            "its frequencies change with the length of a text, and a drafter's keys are kept",
        )
