"""The shape of a drafter, derived from its target so that nothing is guessed.

In: the drafter's settings, the target's configuration, the taps and the width of the codec's features. Out: one frozen
shape that builds the model, is saved with every checkpoint and becomes the export's config. What the target does not
say is refused by name, above all RoPE and the mask token: both are silent when wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from headrace.config import DrafterConfig
from headrace.errors import DrafterError

FULL, SLIDING = "full_attention", "sliding_attention"
# Roles whose id must never be the mask token: an engine that masks or stops on one would do so inside every block.
_FORBIDDEN_ROLES = ("pad", "eos", "bos")
# The rotary embedding of a Qwen3 drafter turns whole heads by one position each; engines load nothing else.
_REFUSED_ROPE = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and its arithmetic.

    `rope` is the target's `rope_parameters`; `taps` are names in column order; `num_features` is the width F of what
    the codec hands out; `features` is False for the floor, whose blocks see no target state. `layer_types` (none given:
    full attention everywhere) says which layers see only what lies less than `sliding_window` tokens away.
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
        if self.hidden_act != "silu":
            raise DrafterError("hidden_act silu", self.hidden_act, "engines run a drafter's MLP with silu only")

    def window(self, layer: int) -> int | None:
        """The window of a layer; None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's form: JSON values only."""
        lists = {"taps": list(self.taps), "layer_types": list(self.layer_types)}
        return {**asdict(self), "rope": dict(self.rope), **lists}

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


def derive_shape(
    cfg: DrafterConfig,
    target_config: Any,
    taps: Sequence[str],
    num_features: int,
    special_ids: Mapping[str, Sequence[int]],
) -> DrafterShape:
    """Derive a drafter's shape from its target's transformers configuration.

    Args:
        target_config: a PretrainedConfig; of a multimodal target its text part is used.
        special_ids: ids by role: mask (the target's own, if any), pad, eos, bos.
    Raises: DrafterError for a missing or unsupported RoPE, for no mask token, and for one that is pad, EOS or BOS.
    """
    text = target_config.get_text_config()
    head_dim = _attribute(text, "head_dim") or text.hidden_size // text.num_attention_heads
    kv_heads = _attribute(text, "num_key_value_heads") or text.num_attention_heads
    return DrafterShape(
        hidden_size=int(text.hidden_size),
        intermediate_size=int(cfg.intermediate_size or text.intermediate_size),
        num_layers=cfg.num_layers,
        num_heads=int(cfg.num_heads or text.num_attention_heads),
        num_kv_heads=int(cfg.num_kv_heads or kv_heads),
        head_dim=int(head_dim),
        rms_norm_eps=float(text.rms_norm_eps),
        rope=_rope(text),
        max_position_embeddings=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        block_size=cfg.block_size,
        mask_token_id=_mask_token(cfg.mask_token_id, special_ids),
        taps=tuple(taps),
        num_target_layers=int(text.num_hidden_layers),
        num_features=num_features,
        features=cfg.features,
        layer_types=tuple(cfg.layer_types or ()),
        sliding_window=cfg.sliding_window,
    )


def _attribute(config: Any, name: str) -> Any:
    """A field that some architectures leave out; what stands in for it is said where it is used."""
    return getattr(config, name, None)


def _rope(text: Any) -> dict[str, Any]:
    rope = _attribute(text, "rope_parameters")
    if not rope or "rope_theta" not in rope or "rope_type" not in rope:
        raise DrafterError(
            "rope_parameters with rope_theta and rope_type in the target's config",
            repr(rope),
            "a drafter with another RoPE than its target is accepted by nobody and noticed by nobody; "
            "write the target's own into its config.json",
        )
    partial = rope.get("partial_rotary_factor", 1.0)
    refused = [key for key in _REFUSED_ROPE if rope.get(key)]
    if refused or partial != 1.0:
        raise DrafterError(
            "one rotary embedding over whole heads",
            f"partial_rotary_factor {partial}, {', '.join(refused) or 'no M-RoPE'}",
            "engines cannot serve such a drafter yet",
        )
    return dict(rope)


def _mask_token(explicit: int | None, special_ids: Mapping[str, Sequence[int]]) -> int:
    own = special_ids.get("mask", ())
    if explicit is None and not own:
        raise DrafterError(
            "a mask token",
            "none in the run file and none of the target's own",
            "set drafter.mask_token_id to an unused special token of the target",
        )
    mask = own[0] if explicit is None else explicit
    for role in _FORBIDDEN_ROLES:
        if mask in special_ids.get(role, ()):
            raise DrafterError(
                "a mask token that means nothing else",
                f"{mask}, which is the target's {role} token",
                "set drafter.mask_token_id to an unused special token of the target",
            )
    return mask
