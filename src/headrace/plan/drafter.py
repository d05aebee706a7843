"""How large the drafter is, before it exists.

In: the target's geometry and the drafter's shape as far as it is given, or a published drafter's `config.json`. Out:
parameters, floating-point operations of a training step, and memory to train it. Parts: `fc` (taps to hidden size), the
decoder layers, the norms; embedding and head are the target's, frozen.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import PlanError
from headrace.plan.blocks import Fields
from headrace.plan.geometry import Geometry, read_config
from headrace.plan.quantity import Figure

# Weights, gradients and AdamW's two moments in float32.
STATE_BYTES_PER_PARAM = 16


@dataclass(frozen=True)
class DrafterSize:
    """Shape of a DFlash drafter. `num_features` is what `fc` reads of a token; `vocab_size` the frozen head's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_features: int
    vocab_size: int
    block_size: int
    notes: tuple[str, ...] = ()

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer, its norms left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def fc_params(self) -> int:
        """Parameters of the map from features to the drafter's hidden size."""
        return self.num_features * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the frozen head."""
        return self.vocab_size * self.hidden_size

    @property
    def params(self) -> int:
        """Trained parameters."""
        norms = self.num_layers * (2 * self.hidden_size + 2 * self.head_dim) + 2 * self.hidden_size
        return self.num_layers * self.layer_params + self.fc_params + norms

    def position_flops(self) -> Figure:
        """Training one slot of one block: forward and backward of the layers (6), through the frozen head (4)."""
        layers = self.num_layers * self.layer_params
        value = 6.0 * layers + 4.0 * self.head_params
        return Figure(
            value, "FLOP", f"6 x {layers / 1e9:.3f} G in layers + 4 x {self.head_params / 1e9:.3f} G in the frozen head"
        )

    def context_flops(self) -> Figure:
        """Training one context token: `fc`, then keys and values of every layer."""
        keys = self.num_layers * 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        value = 6.0 * (self.fc_params + keys)
        return Figure(
            value, "FLOP", f"6 x ({self.fc_params / 1e6:.1f} M in fc + {keys / 1e6:.1f} M in keys and values)"
        )

    def sample_flops(self, num_tokens: float, anchors: float) -> Figure:
        """Training one sample at one visit, with so many blocks drawn from it."""
        position, context = self.position_flops(), self.context_flops()
        slots = anchors * self.block_size
        value = slots * position.value + num_tokens * context.value
        formula = (
            f"{anchors:,.0f} anchors x {self.block_size} slots x {position.value / 1e9:.2f} GFLOP"
            f" + {num_tokens:,.0f} tokens x {context.value / 1e9:.2f} GFLOP"
        )
        return Figure(value, "FLOP", formula)

    def train_memory(self, num_tokens: float, anchors: float) -> Figure:
        """Memory of one rank: training state, frozen embedding and head in bfloat16, activations of one sample."""
        state = STATE_BYTES_PER_PARAM * self.params
        frozen = 4 * self.head_params
        slot = 2 * (
            8 * self.hidden_size + 3 * self.intermediate_size + 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        )
        activations = anchors * self.block_size * self.num_layers * slot
        features = 4 * num_tokens * self.num_features
        formula = (
            f"{self.params / 1e9:.3f} G parameters x {STATE_BYTES_PER_PARAM} B (float32 weights, gradients, AdamW)"
            f" + {frozen / 1e9:.1f} GB frozen embedding and head + {activations / 1e9:.1f} GB activations of"
            f" {anchors:,.0f} x {self.block_size} slots in {self.num_layers} layers + {features / 1e9:.2f} GB features"
        )
        return Figure(state + frozen + activations + features, "B", formula, True)

    def export_bytes(self) -> Figure:
        """The drafter as it is served: bfloat16, `fc` folded back to the raw taps."""
        return Figure(2.0 * self.params, "B", f"{self.params / 1e9:.3f} G parameters x 2 B")


@dataclass(frozen=True)
class DrafterChoice:
    """What a person says about the drafter; None means: from the target."""

    num_layers: int | None = None
    block_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


def default_depth(hidden_size: int) -> tuple[int, int, str]:
    """Layers and block of a drafter, and why.

    Source: z-lab's and SpecForge's published drafters: five layers and blocks of 16 from hidden size 896 on.
    """
    if hidden_size < 768:
        return 2, 8, "a small target: its drafter must stay cheaper than it"
    return 5, 16, "as in most published drafters"


def default_heads(
    hidden_size: int, heads: int, kv_heads: int, head_dim: int, latent: bool
) -> tuple[int, int, int, str]:
    """Query heads, key heads and head size of a drafter, and why.

    A target's own are taken where they are plain. Heads wider than 128, and those of latent attention, which has no
    key heads, are replaced by as many of 128 as published drafters of such targets have (32 on 8, for Qwen3.6-27B).
    """
    if not latent and head_dim <= 128:
        return heads, kv_heads, head_dim, "the target's own"
    own = 1 << (min(32, max(1, hidden_size // 64)).bit_length() - 1)
    kind = "the target's attention is latent" if latent else f"the target's heads of {head_dim} are too wide"
    return own, max(1, own // 4), 128, f"{kind}: heads of 128, as published drafters of such targets have"


def default_width(hidden_size: int, dense: int | None, has_experts: bool) -> tuple[int, str]:
    """MLP width of a drafter, and why: of a mixture of experts, `dense` may be the width of one expert."""
    if dense is not None and not (has_experts and dense < 2 * hidden_size):
        return dense, "the target's own"
    return 3 * hidden_size, "3 x hidden size: the target names no dense MLP width"


def derive_drafter(target: Geometry, num_features: int, choice: DrafterChoice) -> DrafterSize:
    """Derive a drafter from its target, as the drafter room does; what is assumed is noted."""
    notes = []
    layers, block, _ = default_depth(target.hidden_size)
    has_experts = target.params > 0 and target.active_block_params < target.block_params
    derived, _ = default_width(target.hidden_size, target.intermediate_size, has_experts)
    width = choice.intermediate_size or derived
    if choice.intermediate_size is None and derived != target.intermediate_size:
        notes.append(f"the target names no dense MLP width: {width} (3 x hidden size) is assumed for the drafter")
    latent = any(mixer.kind == "latent" for mixer in target.mixers)
    heads, kv_heads, head_dim, _ = default_heads(
        target.hidden_size, target.num_heads, target.num_kv_heads, target.head_dim, latent
    )
    return DrafterSize(
        hidden_size=target.hidden_size,
        intermediate_size=width,
        num_layers=choice.num_layers or layers,
        num_heads=choice.num_heads or heads,
        num_kv_heads=choice.num_kv_heads or kv_heads,
        head_dim=choice.head_dim or head_dim,
        num_features=num_features,
        vocab_size=target.vocab_size,
        block_size=choice.block_size or block,
        notes=tuple(notes),
    )


def read_drafter(path: Path, num_features: int) -> tuple[DrafterSize, tuple[int, ...]]:
    """Read a published drafter's config.json: its size, and its taps as z-lab numbers (none if it names none).

    Raises: PlanError for a file that is no DFlash drafter's.
    """
    config = read_config(path / "config.json" if path.is_dir() else path)
    inner = config.get("dflash_config")
    if not isinstance(inner, dict):
        raise PlanError(
            "a DFlash drafter's config.json (with dflash_config)",
            f"{path}",
            "give --layers, --block and the like instead",
        )
    fields = Fields(config, path.name)
    block = Fields({**inner, **config}, path.name).need("block_size")
    heads, hidden = fields.need("num_attention_heads"), fields.need("hidden_size")
    size = DrafterSize(
        hidden_size=hidden,
        intermediate_size=fields.need("intermediate_size"),
        num_layers=fields.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.maybe("num_key_value_heads") or heads,
        head_dim=fields.maybe("head_dim") or hidden // heads,
        num_features=num_features,
        vocab_size=fields.need("vocab_size"),
        block_size=block,
    )
    taps = inner.get("target_layer_ids") or ()
    return size, tuple(int(t) for t in taps)


def with_features(drafter: DrafterSize, num_features: int) -> DrafterSize:
    """The same drafter reading another width of features."""
    return replace(drafter, num_features=num_features)
