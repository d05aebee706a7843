"""A DFlash drafter in speculators' layout: its `config.json`, written and read.

In: a drafter's shape and its target; or a folder that speculators wrote. Out: the config with the keys its
`DFlashSpeculatorConfig` has; or a drafter ready to run. The tensors have z-lab's names; embedding and head are the
target's in both layouts. Source: speculators 0.9.0, `models/dflash`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.drafter.model import Drafter
from headrace.drafter.shape import SLIDING, DrafterShape
from headrace.drafter.stock import (
    ARCHITECTURE,
    build,
    load_stock,
    read_folder,
    shape_from_stock,
    stock_config,
    tensor_shapes,
    vocabulary_keys,
)
from headrace.errors import ConfigError, ExportError
from headrace.taps import from_speculators, parse_taps, to_speculators, to_zlab

VERSION = "0.9.0"
MODEL_TYPE = "speculators_model_type"
# Copies of the target's frozen ends, which some releases store; headrace reads the target's own.
_FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range",
    "max_position_embeddings", "rope_parameters", "vocab_size", "tie_word_embeddings", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "use_cache", "model_type",
)  # fmt: skip


def speculators_config(
    shape: DrafterShape,
    target: str,
    architectures: Sequence[str],
    special_ids: Mapping[str, Any],
    scales: Mapping[str, float],
) -> dict[str, Any]:
    """The `config.json` of a drafter for speculators.

    Args:
        target: name or path of the target, from which their package takes embedding and head.
        architectures: the target's, from its config.
        special_ids: bos_token_id, eos_token_id, pad_token_id of the target, those that it has.
        scales: of a target that scales embeddings or logits, which this layout cannot say.
    Raises: ExportError for a windowed drafter, and for a target with scales: their package would compute other logits.
    """
    if SLIDING in shape.layer_types:
        raise ExportError(
            "full attention in every layer",
            f"layers {', '.join(shape.layer_types)}",
            "speculators counts a window from the block's anchor, headrace from each slot: export to z-lab's layout",
        )
    if scales:
        raise ExportError(
            "a target that neither scales nor caps", ", ".join(sorted(scales)), "speculators' layout has no key for it"
        )
    taps = parse_taps(shape.taps, shape.num_target_layers)
    stock = stock_config(shape, {}, {})
    layers = {key: stock[key] for key in _LAYERS}
    return {
        "architectures": [ARCHITECTURE],
        MODEL_TYPE: "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": {**layers, **special_ids},
        "aux_hidden_state_layer_ids": [to_speculators(tap, shape.num_target_layers) for tap in taps],
        "block_size": shape.block_size,
        "draft_vocab_size": shape.vocab_size,
        **vocabulary_keys(shape),
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM takes false for causal layers, those with full attention too
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def shape_from_speculators(config: Mapping[str, Any], num_target_layers: int) -> DrafterShape:
    """Read their config.

    Args: num_target_layers: of the target, which the layout leaves out.
    Raises: ExportError naming each key that is missing, wrong, or stands for what headrace's drafter does not compute.
    """
    layers, ids = config.get("transformer_layer_config"), config.get("aux_hidden_state_layer_ids")
    if config.get(MODEL_TYPE) != "dflash" or not isinstance(layers, Mapping) or not isinstance(ids, list):
        raise ExportError(
            f"{MODEL_TYPE} dflash with transformer_layer_config and aux_hidden_state_layer_ids",
            f"{config.get(MODEL_TYPE)} with {', '.join(sorted(map(str, config)))}",
            "give a DFlash drafter of speculators",
        )
    wrong = {
        "sample_from_anchor": bool(config.get("sample_from_anchor")),
        "target_hidden_size": config.get("target_hidden_size") not in (None, layers.get("hidden_size")),
        "layer_types (their window counts from the anchor)": SLIDING in (layers.get("layer_types") or ()),
    }
    if any(wrong.values()):
        found = ", ".join(key for key, is_wrong in wrong.items() if is_wrong)
        raise ExportError("a drafter as headrace computes it", f"another {found}", "train it on in speculators")
    try:
        taps = [to_zlab(from_speculators(number, num_target_layers), num_target_layers) for number in ids]
    except (ConfigError, TypeError) as exc:
        wanted = f"aux_hidden_state_layer_ids from 0 to {num_target_layers}"
        raise ExportError(wanted, str(ids), "give a drafter of this target") from exc
    own = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": taps}
    stock = {"architectures": [ARCHITECTURE], "dflash_config": own, "num_target_layers": num_target_layers}
    own_keys = {key: config[key] for key in ("block_size", "draft_vocab_size", "draft_vocab_hash") if key in config}
    return shape_from_stock({**layers, **stock, **own_keys})


def load_any(folder: Path, num_target_layers: int) -> Drafter:
    """A drafter from a folder of z-lab's layout or of speculators', in float32 and in evaluation mode.

    Raises: ExportError as `load_stock`.
    """
    config, tensors = read_folder(folder)
    if MODEL_TYPE not in config:
        return load_stock(folder)
    shape = shape_from_speculators(config, num_target_layers)
    kept = set(tensor_shapes(shape)) | (set(tensors) - set(_FROZEN))
    return build(shape, {name: tensor for name, tensor in tensors.items() if name in kept})
