"""A stock DFlash drafter, as vLLM, SGLang and z-lab's code load it: its `config.json`, written and read.

In: a drafter's shape, or a folder of another program. Out: the config with exactly the keys those programs read; or
the shape, and a drafter ready to run. Both directions stand side by side here, so that they cannot drift apart.
Layout: z-lab's `DFlashDraftModel` (huggingface.co/z-lab), the same in SpecForge and Model-Optimizer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.drafter.model import Drafter
from headrace.drafter.shape import SLIDING, DrafterShape
from headrace.errors import ExportError
from headrace.taps import from_zlab, parse_taps, to_zlab

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def stock_config(shape: DrafterShape, special_ids: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, Any]:
    """The `config.json` of a drafter.

    Args:
        special_ids: bos_token_id, eos_token_id, pad_token_id of the target, those that it has.
        scales: input_embedding_scale, output_multiplier, final_logit_softcapping of a target that has them.
    `block_size` stands twice, and the rotary settings in both layouts of transformers: programs read one or the other.
    """
    rope = dict(shape.rope)
    scaled = rope["rope_type"] != "default"
    taps = parse_taps(shape.taps, shape.num_target_layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": [to_zlab(tap, shape.num_target_layers) for tap in taps],
            "block_size": shape.block_size,
            **({} if shape.sliding_window is None else _windowed(shape.sliding_window)),
            **scales,
        },
        "num_target_layers": shape.num_target_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
        "max_window_layers": shape.num_layers,
        "use_cache": True,
        "dtype": "bfloat16",
        **special_ids,
        **({} if shape.sliding_window is None else {"is_causal": False}),
    }


def _windowed(window: int) -> dict[str, Any]:
    """What engines read of a drafter with sliding layers; without `causal` some take such layers for causal ones."""
    return {"use_swa": True, "swa_window_size": window, "causal": False}


def shape_from_stock(config: Mapping[str, Any]) -> DrafterShape:
    """Read a stock config.

    Raises: ExportError for another architecture, causal layers, a bias, and for a key that is missing.
    """
    _check_supported(config)
    try:
        own = config["dflash_config"]
        num_target_layers = config["num_target_layers"]
        taps = tuple(str(from_zlab(number, num_target_layers)) for number in own["target_layer_ids"])
        return DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=_rope(config),
            max_position_embeddings=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            block_size=own["block_size"] if "block_size" in own else config["block_size"],
            mask_token_id=own["mask_token_id"],
            taps=taps,
            num_target_layers=num_target_layers,
            num_features=len(taps) * config["hidden_size"],
            hidden_act=config["hidden_act"],
            features=True,
            layer_types=tuple(config.get("layer_types") or ()),
            sliding_window=config.get("sliding_window") if SLIDING in (config.get("layer_types") or ()) else None,
        )
    except KeyError as exc:
        raise ExportError(
            f"the key {exc} in a drafter's config.json", "none", "the folder is not z-lab's layout"
        ) from exc


def load_stock(folder: Path) -> Drafter:
    """A drafter from a stock folder, in float32 and in evaluation mode; its features are the raw taps.

    Raises: ExportError for a missing or unreadable file, an unsupported config, missing or unknown tensors.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as exc:
        raise ExportError(f"{CONFIG} and {WEIGHTS} in {folder}", str(exc), "export the drafter again") from exc
    drafter = Drafter(shape_from_stock(config), seed=0)
    names = {name for name, _ in drafter.named_parameters()}
    if names != set(tensors):
        raise ExportError(
            f"the {len(names)} tensors of a DFlash drafter",
            f"missing {sorted(names - set(tensors))}, unknown {sorted(set(tensors) - names)}",
            "the folder is of another drafter, or damaged",
        )
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    return drafter.eval()


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuse what headrace's drafter does not compute; leaving it out would only lower τ, silently."""
    if config.get("architectures") != [ARCHITECTURE]:
        raise ExportError(f"architectures [{ARCHITECTURE}]", str(config.get("architectures")), "give a DFlash drafter")
    told = (config.get("is_causal"), config.get("dflash_config", {}).get("causal"))
    sliding = SLIDING in (config.get("layer_types") or [])
    causal = any(told) or (sliding and False not in told)  # z-lab's code takes sliding layers for causal unless told
    if causal or config.get("attention_bias") or (config.get("use_sliding_window") and not sliding):
        raise ExportError(
            "layers without bias, whose slots see each other both ways",
            f"layer_types {config.get('layer_types')}, is_causal {told[0]}, causal {told[1]},"
            f" attention_bias {config.get('attention_bias')}",
            "this version runs such drafters only in their own programs",
        )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings from either layout; the base is never guessed."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    return {"rope_type": kind, "rope_theta": config["rope_theta"], **scaling}
