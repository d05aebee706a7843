"""What a target's `config.json` says about sizes.

In: a folder, a file, a hub id (looked for in the local cache first) or plain numbers. Out: hidden size, blocks,
parameters in all and at work, KV cache. Dense, mixture-of-experts, hybrid linear-attention and multimodal-nested
layouts are read; an unknown architecture and a drafter's config are refused by name. Only the text part is counted.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import PlanError
from headrace.plan.blocks import Fields, Mixer, mixer, mlp

FAMILIES = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 gemma gemma2 gemma3_text gemma4_text glm_moe_dsa gpt_oss "
    "kimi_k2 kimi_linear llama llama4_text mimo_v2_flash minimax_m2 mistral mixtral olmo2 phi3 qwen2 qwen2_moe qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3".split()
)
# transformers ties these unless told otherwise, and their published files rely on it.
_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gemma4_text"})
_DEFAULT_VOCABULARY = {"gemma3_text": 262208}
_APPROXIMATE = {
    "deepseek_v4": "its residual stream is several copies wide: bytes are for one mixed state a tap",
    "kimi_linear": "its residual stream goes through attention residuals: bytes are for one state a tap",
}
_DEMO = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
_DRAFTER_KEYS = ("dflash_config", "draft_vocab_size", "target_hidden_size", "num_target_layers")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a target's text part; parameters and elements are counts, not bytes."""

    name: str
    family: str
    hidden_size: int
    num_blocks: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int | None
    block_params: int
    active_block_params: int
    embedding_params: int
    tied: bool
    mixers: tuple[Mixer, ...]
    notes: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        """All parameters: blocks, embedding and head."""
        return self.block_params + self.embedding_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Parameters at work for one token that is generated: active blocks and the head."""
        return self.active_block_params + self.embedding_params

    def attention_flops(self, length: float) -> float:
        """Floating-point operations of attention for one token of a text of `length` tokens, averaged over the text."""
        return sum(m.pair_flops * min(length / 2, m.window or length) for m in self.mixers)

    def kv_bytes(self, length: float) -> float:
        """KV cache and recurrent state of one text of `length` tokens: bfloat16 cache, float32 state."""
        cache = sum(
            2 * m.kv_elements * min(length, (m.window or length) if m.kind == "sliding" else length)
            for m in self.mixers
        )
        return cache + sum(4 * m.state_elements for m in self.mixers)

    def kinds(self) -> dict[str, int]:
        """How many blocks mix tokens in which way."""
        found: dict[str, int] = {}
        for m in self.mixers:
            found[m.kind] = found.get(m.kind, 0) + 1
        return found


def read_geometry(model: str) -> Geometry:
    """Read the sizes of `demo`, of a folder, of a config.json or of a hub id.

    Raises: PlanError for no file, broken JSON, missing keys, an unknown architecture or a drafter's config.
    """
    if model == "demo":
        return geometry_from_config(_DEMO, "demo (SmolLM2-135M-Instruct)")
    path = find_config(model)
    return geometry_from_config(read_config(path), path.parent.name if path.name == "config.json" else path.stem)


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: PlanError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise PlanError("a readable config.json", f"{path}: {exc}", "check the file") from exc
    if not isinstance(value, dict):
        raise PlanError("a JSON object", f"{path} holds a {type(value).__name__}", "use the model's config.json")
    return value


def find_config(model: str) -> Path:
    """Find the config.json of a folder, file or hub id; the hub is asked only if its cache has none."""
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise PlanError(
            "a config.json in the folder", f"{path} without one", "name the model's folder or its config.json"
        )
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise PlanError("a folder, a config.json or a hub id (owner/name)", f"no {model}", "check the path")
    return _cached(model) or _download(model)


def _cached(hub_id: str) -> Path | None:
    """Look into the hub's cache by its documented layout, which costs no import."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = sorted((root / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return found[-1] if found else None


def _download(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (OSError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise PlanError(f"the config.json of {hub_id} on the hub", reason, "download it, and name its path") from exc


def geometry_from_config(config: Mapping[str, Any], name: str) -> Geometry:
    """Count a target's text part. Raises: PlanError as `read_geometry`."""
    _refuse_drafter(config, name)
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    fields = Fields(text, name)
    family = str(text.get("model_type", "missing"))
    if family not in FAMILIES:
        raise PlanError(
            f"a known architecture ({', '.join(sorted(FAMILIES))})",
            f"model_type {family} of {name}",
            "give plain numbers instead: --hidden-size, --blocks and --params (billions)",
        )
    num_blocks = fields.need("num_hidden_layers")
    hidden = fields.need("hidden_size")
    mixers = tuple(mixer(fields, i) for i in range(num_blocks))
    mlps = tuple(mlp(fields, i) for i in range(num_blocks))
    always = sum(m.params for m in mixers) + 2 * hidden * num_blocks + hidden
    vocabulary = fields.maybe("vocab_size") or _DEFAULT_VOCABULARY.get(family) or fields.need("vocab_size")
    heads = fields.need("num_attention_heads")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in _TIED))
    return Geometry(
        name=name,
        family=family,
        hidden_size=hidden,
        num_blocks=num_blocks,
        vocab_size=vocabulary,
        num_heads=heads,
        num_kv_heads=fields.maybe("num_key_value_heads") or heads,
        head_dim=fields.maybe("head_dim") or hidden // heads,
        intermediate_size=_dense_width(fields),
        block_params=always + sum(m.params for m in mlps),
        active_block_params=always + sum(m.active for m in mlps),
        embedding_params=vocabulary * hidden,
        tied=bool(tied),
        mixers=mixers,
        notes=_notes(config, text, family),
    )


def plain_geometry(hidden_size: int, num_blocks: int, params: float, active_params: float | None = None) -> Geometry:
    """Sizes from plain numbers. The embedding is counted inside the parameters, attention and KV cache as none."""
    if min(hidden_size, num_blocks) < 1 or params <= 0:
        raise PlanError(
            "a positive hidden size, depth and parameter count", f"{hidden_size}, {num_blocks}, {params}", "check them"
        )
    heads = max(1, hidden_size // 128)
    return Geometry(
        name=f"{params / 1e9:.3g} B parameters, {num_blocks} blocks of {hidden_size}",
        family="plain numbers",
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        vocab_size=0,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        intermediate_size=None,
        block_params=int(params),
        active_block_params=int(active_params or params),
        embedding_params=0,
        tied=True,
        mixers=(),
        notes=("sizes come from plain numbers: attention, KV cache and the head are left out",),
    )


def _dense_width(fields: Fields) -> int | None:
    """The width of a dense MLP; some mixture-of-experts layouts have none, or call the experts' width so."""
    experts = fields.maybe("num_experts", "n_routed_experts", "num_local_experts")
    if experts and fields.maybe("moe_intermediate_size") is None:
        return None
    return fields.maybe("intermediate_size") if experts else fields.need("intermediate_size")


def _refuse_drafter(config: Mapping[str, Any], name: str) -> None:
    architectures = config.get("architectures") or ["?"]
    first = str(architectures[0] if isinstance(architectures, list) else architectures)
    if any(key in config for key in _DRAFTER_KEYS) or "Draft" in first or "Eagle" in first:
        raise PlanError(
            "the config.json of a target",
            f"a drafter's ({first}) in {name}",
            "name the target; a drafter goes to --drafter",
        )


def _notes(config: Mapping[str, Any], text: Mapping[str, Any], family: str) -> tuple[str, ...]:
    notes = []
    quantised = config.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method", "an unnamed method")
        notes.append(
            f"the config is of weights quantised by {method}; weights are planned in the target's planned dtype"
        )
    if "vision_config" in config or "audio_config" in config:
        notes.append("towers for images and sound are not counted: states are captured from text")
    if family in _APPROXIMATE:
        notes.append(f"parameters of {family} are approximate, and {_APPROXIMATE[family]}")
    return tuple(notes)
