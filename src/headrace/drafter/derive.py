"""A drafter's shape derived from its target, each part with its reason.

In: the drafter's settings, the target's configuration, the taps, the width of the codec's features, and a drafter to
start from, if any. Out: the shape, and one line of reason for each setting that was not given. What the target does
not say is refused by name, above all RoPE and the mask token: both are silent when wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import DrafterConfig
from headrace.drafter.shape import FULL, DrafterShape
from headrace.errors import DrafterError
from headrace.plan.drafter import default_depth, default_heads, default_width

# Roles whose id must never be the mask token: an engine that masks or stops on one would do so inside every block.
_FORBIDDEN_ROLES = ("pad", "eos", "bos")
# Only latent attention reads these; to other attention engines apply yarn's own scale, as transformers does without.
_LATENT_ROPE = ("mscale", "mscale_all_dim")
_AXES = ("mrope_section", "mrope_interleaved")
# What a drafter keeps of the one it starts from, and the setting that would change it.
_KEPT = {
    "num_layers": "num_layers", "block_size": "block_size", "mask_token_id": "mask_token_id",
    "intermediate_size": "intermediate_size", "num_heads": "num_heads", "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "layer_types": "layer_types", "sliding_window": "sliding_window",
    "sliding_causal": "sliding_causal", "draft_vocabulary": "draft_vocab_size",
}  # fmt: skip


@dataclass(frozen=True)
class Derived:
    """A shape, and why it is so: `reasons` are lines "drafter.SETTING VALUE: why"."""

    shape: DrafterShape
    reasons: tuple[str, ...]


def derive_shape(
    cfg: DrafterConfig,
    target_config: Any,
    taps: Sequence[str],
    num_features: int,
    special_ids: Mapping[str, Sequence[int]],
) -> DrafterShape:
    """The shape alone; see `derive`."""
    return derive(cfg, target_config, taps, num_features, special_ids).shape


def derive(
    cfg: DrafterConfig,
    target_config: Any,
    taps: Sequence[str],
    num_features: int,
    special_ids: Mapping[str, Sequence[int]],
    start: DrafterShape | None = None,
) -> Derived:
    """Derive a drafter's shape from its target's transformers configuration, or from a drafter that it goes on from.

    Args:
        target_config: a PretrainedConfig; of a multimodal target its text part is used.
        special_ids: ids by role: mask (the target's own, if any), unused (a row no text produces), pad, eos, bos.
        start: shape of the drafter in drafter.init_from; its taps, mask token, vocabulary and sizes are kept.
    Raises: DrafterError for a missing or unsupported RoPE, for no mask token, for one that is pad, EOS or BOS, and
    naming each field in which `start` is not of this target, these taps or these settings.
    """
    text = target_config.get_text_config()
    if start is not None:
        return _continue(cfg, text, taps, num_features, start, special_ids)
    told = _Told(cfg)
    hidden = int(text.hidden_size)
    layers, block, why_depth = default_depth(hidden)
    heads, kv_heads, head_dim, why_heads = _heads(text)
    width, why_width = default_width(hidden, _field(text, "intermediate_size"), _has_experts(text))
    rope, why_rope = _rope(text)
    mask, why_mask = _mask_token(cfg.mask_token_id, special_ids)
    told.reason("rope", f"{rope['rope_type']}, base {rope['rope_theta']:g}", why_rope)
    if cfg.mask_token_id is None:
        told.reason("mask_token_id", mask, why_mask)
    why_full = "every engine runs it; drafter.sliding_window bounds its memory on long texts"
    if cfg.layer_types is None:
        told.reason("layer_types", FULL, why_full)
    shape = DrafterShape(
        hidden_size=hidden,
        intermediate_size=told.choose("intermediate_size", width, why_width),
        num_layers=told.choose("num_layers", layers, why_depth),
        num_heads=told.choose("num_heads", heads, why_heads),
        num_kv_heads=told.choose("num_kv_heads", kv_heads, why_heads),
        head_dim=told.choose("head_dim", head_dim, why_heads),
        rms_norm_eps=float(text.rms_norm_eps),
        rope=rope,
        max_position_embeddings=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        block_size=told.choose("block_size", block, why_depth),
        mask_token_id=mask,
        taps=tuple(taps),
        num_target_layers=int(text.num_hidden_layers),
        num_features=num_features,
        features=cfg.features,
        layer_types=tuple(cfg.layer_types or ()),
        sliding_window=cfg.sliding_window,
        sliding_causal=cfg.sliding_causal is not False and cfg.sliding_window is not None,
    )
    return Derived(shape, tuple(told.reasons))


class _Told:
    """Takes what the run file gives, and notes why what it does not give is so."""

    def __init__(self, cfg: DrafterConfig) -> None:
        self._cfg = cfg
        self.reasons: list[str] = []

    def choose(self, setting: str, derived: int, why: str) -> int:
        """The setting's value, or the derived one with its reason."""
        given: int | None = getattr(self._cfg, setting)
        if given is not None:
            return given
        self.reason(setting, derived, why)
        return derived

    def reason(self, setting: str, value: Any, why: str) -> None:
        """Note a reason."""
        self.reasons.append(f"drafter.{setting} {value}: {why}")


def _field(config: Any, name: str) -> Any:
    """A field that some architectures leave out; what stands in for it is said where it is used.

    Looked up among the config's own values first: where blocks differ (Gemma 4), the attribute refuses to be read.
    """
    own = config.to_dict()
    return own[name] if name in own else getattr(config, name, None)


def _has_experts(text: Any) -> bool:
    return any(_field(text, name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))


def _heads(text: Any) -> tuple[int, int, int, str]:
    heads = int(_field(text, "num_attention_heads"))
    kv_heads = int(_field(text, "num_key_value_heads") or heads)
    head_dim = int(_field(text, "head_dim") or text.hidden_size // heads)
    latent = _field(text, "kv_lora_rank") is not None
    return default_heads(int(text.hidden_size), heads, kv_heads, head_dim, latent)


def _rope(text: Any) -> tuple[dict[str, Any], str]:
    """The rotary embedding of a drafter: the target's base and scaling, whole heads, one axis."""
    rope = _field(text, "rope_parameters")
    if rope and FULL in rope:
        rope, of = rope[FULL], "the target's full-attention blocks' own"
    else:
        of = "the target's own"
    if not rope or "rope_theta" not in rope or "rope_type" not in rope:
        raise DrafterError(
            "rope_parameters with rope_theta and rope_type in the target's config",
            repr(rope),
            "a drafter with another RoPE than its target is accepted by nobody and noticed by nobody; "
            "write the target's own into its config.json",
        )
    kept = {key: value for key, value in rope.items() if value is not None}
    notes = [of]
    if [kept.pop(key) for key in _AXES if key in kept]:
        notes.append("its axes for images are left out: text has the same position on each")
    if kept.pop("partial_rotary_factor", 1.0) != 1.0 or kept["rope_type"] == "proportional":
        notes.append("over whole heads, where the target turns a part: engines turn a drafter's whole heads")
        kept["rope_type"] = "default" if kept["rope_type"] == "proportional" else kept["rope_type"]
    if [kept.pop(key) for key in _LATENT_ROPE if key in kept]:
        notes.append("without mscale, which engines apply to latent attention only")
    return kept, "; ".join(notes)


def _mask_token(explicit: int | None, special_ids: Mapping[str, Sequence[int]]) -> tuple[int, str]:
    candidates = {"the target's own mask token": "mask", "a row of the embedding that no text produces": "unused"}
    found = [(ids[0], why) for why, role in candidates.items() if (ids := special_ids.get(role, ()))]
    if explicit is None and not found:
        raise DrafterError(
            "a mask token",
            "none in the run file, none of the target's own, no unused row in its embedding",
            "set drafter.mask_token_id to a special token of the target that no chat contains",
        )
    mask, why = found[0] if explicit is None else (explicit, "given")
    for role in _FORBIDDEN_ROLES:
        if mask in special_ids.get(role, ()):
            raise DrafterError(
                "a mask token that means nothing else",
                f"{mask}, which is the target's {role} token",
                "set drafter.mask_token_id to an unused special token of the target",
            )
    return mask, why


def _continue(
    cfg: DrafterConfig,
    text: Any,
    taps: Sequence[str],
    num_features: int,
    start: DrafterShape,
    special_ids: Mapping[str, Sequence[int]],
) -> Derived:
    """The shape of a drafter that goes on from another, whose every field must fit."""
    ours = {
        "hidden_size (target)": (int(text.hidden_size), start.hidden_size),
        "vocab_size (target)": (int(text.vocab_size), start.vocab_size),
        "num_target_layers (target)": (int(text.num_hidden_layers), start.num_target_layers),
        "taps (target.taps)": (list(taps), list(start.taps)),
    }
    for setting, field in _KEPT.items():
        given = getattr(cfg, setting)
        if given is not None:
            own = getattr(start, field)
            ours[f"{field} (drafter.{setting})"] = (given, list(own) if isinstance(own, tuple) else own)
    wrong = {name: pair for name, pair in ours.items() if pair[0] != pair[1]}
    if wrong:
        raise DrafterError(
            "a drafter in drafter.init_from that fits this run: "
            + ", ".join(f"{name} {mine}" for name, (mine, _) in wrong.items()),
            ", ".join(f"{name.partition(' ')[0]} {theirs}" for name, (_, theirs) in wrong.items()),
            "change the setting in brackets, capture the taps it reads, or leave drafter.init_from out",
        )
    _mask_token(start.mask_token_id, special_ids)
    shape = DrafterShape.from_json({**start.to_json(), "num_features": num_features, "features": cfg.features})
    return Derived(shape, ("drafter: taps, mask token, vocabulary and sizes are those of drafter.init_from",))
