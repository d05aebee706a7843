"""A stock DFlash drafter, as vLLM, SGLang and z-lab's code load it: its `config.json`, written and read.

In: a drafter's shape, or a folder of another program. Out: the config with exactly the keys those programs read; or
the shape, and a drafter ready to run. Both directions stand side by side here, so that they cannot drift apart.
Layout: z-lab's `DFlashDraftModel` (huggingface.co/z-lab), the same in SpecForge and Model-Optimizer.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.drafter.draft_vocabulary import D2T, ROWS, T2D, checked_ids, vocabulary_hash
from headrace.drafter.model import Drafter
from headrace.drafter.shape import FULL, SLIDING, DrafterShape
from headrace.errors import DrafterError, ExportError
from headrace.taps import from_zlab, parse_taps, to_zlab

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"

RopeValue = bool | int | float | str | list[float] | None
K = TypeVar("K", bound=BaseModel)


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
            **_windowed(shape),
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
        **({} if shape.sliding_window is None or shape.sliding_causal else {"is_causal": False}),
        **vocabulary_keys(shape),
    }


def vocabulary_keys(shape: DrafterShape) -> dict[str, Any]:
    """Size and hash of a reduced vocabulary; nothing for the whole one."""
    if shape.draft_vocab_size is None:
        return {}
    return {"draft_vocab_size": shape.draft_vocab_size, "draft_vocab_hash": shape.draft_vocab_hash}


def _windowed(shape: DrafterShape) -> dict[str, Any]:
    """What engines read of a drafter with sliding layers, which they take for causal ones where nothing is said.

    `causal` true would hold for layers with full attention too.
    """
    if shape.sliding_window is None:
        return {}
    both_ways = {} if shape.sliding_causal else {"causal": False}
    return {"use_swa": True, "swa_window_size": shape.sliding_window, **both_ways}


class _Keys(BaseModel):
    """Keys of another program's JSON, by type and range; keys that are not read are left alone."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Own(_Keys):
    """`dflash_config`."""

    mask_token_id: NonNegativeInt
    target_layer_ids: list[int] = Field(min_length=1)
    block_size: int | None = Field(None, ge=2)
    causal: bool | None = None
    use_swa: bool | None = None
    attention_sink_bias: bool | None = None
    attention_value_scale: float | None = None


class _Rope(_Keys):
    """Rotary settings; what a scaled kind needs beside these is checked where it is used."""

    rope_type: str
    rope_theta: PositiveFloat
    factor: PositiveFloat | None = None


class _Stock(_Keys):
    """The keys of a stock `config.json` that a drafter is made from."""

    dflash_config: _Own
    num_target_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: int = Field(ge=1, le=1024)
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: int = Field(ge=2, multiple_of=2)
    hidden_act: Literal["silu"]
    rms_norm_eps: PositiveFloat
    max_position_embeddings: PositiveInt
    vocab_size: PositiveInt
    block_size: int | None = Field(None, ge=2)
    rope_theta: float | None = None
    rope_parameters: dict[str, RopeValue] | None = None
    rope_scaling: dict[str, RopeValue] | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool | None = None
    attention_bias: bool | None = None
    is_causal: bool | None = None
    draft_vocab_size: PositiveInt | None = None
    draft_vocab_hash: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> "_Stock":
        own, depth, kinds = self.dflash_config, self.num_target_layers, self.layer_types
        wrong = {
            "block_size is missing": own.block_size is None and self.block_size is None,
            "dflash_config.mask_token_id is not below vocab_size": own.mask_token_id >= self.vocab_size,
            f"dflash_config.target_layer_ids are not each once from -1 to {depth - 1}": (
                len(set(own.target_layer_ids)) != len(own.target_layer_ids)
                or not all(-1 <= number < depth for number in own.target_layer_ids)
            ),
            "num_attention_heads is no multiple of num_key_value_heads": (
                self.num_attention_heads % self.num_key_value_heads != 0
            ),
            "layer_types are not one for each of num_hidden_layers": bool(kinds)
            and len(kinds or ()) != self.num_hidden_layers,
            "draft_vocab_size is above vocab_size": (self.draft_vocab_size or 0) > self.vocab_size,
            "sliding_window is missing": SLIDING in (kinds or ()) and self.sliding_window is None,
        }
        if any(wrong.values()):
            raise ValueError("; ".join(text for text, is_wrong in wrong.items() if is_wrong))
        return self

    @property
    def slides(self) -> bool:
        """Whether any layer has a window."""
        return SLIDING in (self.layer_types or ())

    @property
    def causal(self) -> bool | None:
        """What is said of all layers; None where nothing is, which makes sliding ones causal and others not."""
        return self.dflash_config.causal if self.is_causal is None else self.is_causal


def shape_from_stock(config: Mapping[str, Any]) -> DrafterShape:
    """Read a stock config.

    Raises: ExportError for another architecture, causal layers, a bias, and naming each key that is missing or wrong.
    """
    if not isinstance(config, Mapping) or config.get("architectures") != [ARCHITECTURE]:
        found = config.get("architectures") if isinstance(config, Mapping) else f"a {type(config).__name__}"
        raise ExportError(f"a {CONFIG} with architectures [{ARCHITECTURE}]", str(found), "give a DFlash drafter")
    read = _checked(_Stock, config)
    _check_supported(read)
    own = read.dflash_config
    taps = tuple(str(from_zlab(number, read.num_target_layers)) for number in own.target_layer_ids)
    try:
        return _shape(read, taps)
    except DrafterError as exc:  # its rotary embedding, above all
        raise ExportError(*exc.args) from exc


def _shape(read: _Stock, taps: tuple[str, ...]) -> DrafterShape:
    own = read.dflash_config
    return DrafterShape(
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_layers=read.num_hidden_layers,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads,
        head_dim=read.head_dim,
        rms_norm_eps=read.rms_norm_eps,
        rope=_rope(read),
        max_position_embeddings=read.max_position_embeddings,
        vocab_size=read.vocab_size,
        block_size=own.block_size or read.block_size or 0,
        mask_token_id=own.mask_token_id,
        taps=taps,
        num_target_layers=read.num_target_layers,
        num_features=len(taps) * read.hidden_size,
        hidden_act=read.hidden_act,
        features=True,
        layer_types=tuple(read.layer_types or ()),
        sliding_window=read.sliding_window if read.slides else None,
        sliding_causal=read.slides and read.causal is not False,
        draft_vocab_size=None if read.draft_vocab_size == read.vocab_size else read.draft_vocab_size,
        draft_vocab_hash=read.draft_vocab_hash,
    )


def _checked(keys: type[K], value: Mapping[str, Any]) -> K:
    """Read keys. Raises: ExportError naming each one that is missing or wrong."""
    try:
        return keys.model_validate(dict(value))
    except ValidationError as exc:
        found = "; ".join(_wrong_key(error) for error in exc.errors())
        hint = "the folder is not of z-lab's layout, or was edited"
        raise ExportError(f"a drafter's {CONFIG}", found, hint) from exc


def _wrong_key(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"no {key}"
    return f"{key}: {error['msg']} (found {error['input']!r})" if key else str(error["ctx"]["error"])


def load_stock(folder: Path) -> Drafter:
    """A drafter from a stock folder, in float32 and in evaluation mode; its features are the raw taps.

    Raises: ExportError for a missing or unreadable file, an unsupported config, and for tensors that are missing,
    unknown or of other shapes than the config says.
    """
    config, tensors = read_folder(folder)
    return build(shape_from_stock(config), tensors)


def read_folder(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and tensors of a drafter's folder. Raises: ExportError for a missing or unreadable file."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as exc:
        raise ExportError(f"{CONFIG} and {WEIGHTS} in {folder}", str(exc), "export the drafter again") from exc
    if not isinstance(config, dict):
        raise ExportError(
            f"a JSON object in {folder / CONFIG}", f"a {type(config).__name__}", "give a drafter's folder"
        )
    return config, tensors


def build(shape: DrafterShape, tensors: Mapping[str, torch.Tensor]) -> Drafter:
    """A drafter of these tensors, in float32, in evaluation mode. Raises: ExportError for others than its shape's."""
    _check_tensors(tensors, tensor_shapes(shape))
    try:
        drafter = Drafter(shape, seed=0)
    except (ArithmeticError, KeyError, TypeError, ValueError, StrictDataclassError) as exc:
        # Everything else was checked: what is left is what transformers does not take of the rotary settings.
        raise ExportError("rope_parameters that transformers knows", f"{shape.rope}: {exc}", "mend them") from exc
    floating = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    drafter.load_state_dict({**floating, **_mapping(shape, tensors, drafter)}, strict=False)
    return drafter.eval()


def _mapping(shape: DrafterShape, tensors: Mapping[str, torch.Tensor], drafter: Drafter) -> dict[str, torch.Tensor]:
    """A reduced vocabulary's mapping, whose hash the drafter then has. Raises: ExportError where its parts disagree."""
    if shape.draft_vocab_size is None:
        return {}
    d2t_D, held_V = tensors[D2T].to(torch.int64), tensors[T2D].bool()
    try:
        ids_D = checked_ids(d2t_D, shape.vocab_size, shape.draft_vocab_hash)
    except DrafterError as exc:
        raise ExportError(*exc.args) from exc
    if not torch.equal(held_V.nonzero()[:, 0], ids_D):
        raise ExportError(f"{T2D} of the ids of {D2T}", f"{int(held_V.sum())} other ids", "the folder is damaged")
    drafter.shape = replace(shape, draft_vocab_hash=vocabulary_hash(ids_D, shape.vocab_size))
    return {D2T: d2t_D}


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a stock drafter."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    own = {"fc": (hidden, shape.num_features), "hidden_norm": (hidden,), "norm": (hidden,)}
    layers = {f"layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()}
    size = shape.draft_vocab_size
    mapped = {} if size is None else {D2T: (size,), T2D: (shape.vocab_size,), ROWS: (size, hidden)}
    return {f"{name}.weight": size for name, size in (own | layers).items()} | mapped


def _check_tensors(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    hint = "the folder is of another drafter, or damaged"
    if set(wanted) != set(tensors):
        found = f"missing {sorted(set(wanted) - set(tensors))}, unknown {sorted(set(tensors) - set(wanted))}"
        raise ExportError(f"the {len(wanted)} tensors of a DFlash drafter", found, hint)
    for name, tensor in tensors.items():
        floating = name not in (D2T, T2D)
        if tuple(tensor.shape) != wanted[name] or tensor.is_floating_point() != floating:
            kind = "floating point" if floating else "whole numbers"
            expected = f"{name} of shape {list(wanted[name])} in {kind}, as {CONFIG} says"
            raise ExportError(expected, f"{list(tensor.shape)} in {tensor.dtype}", hint)


def _check_supported(read: _Stock) -> None:
    """Refuse what headrace's drafter does not compute; leaving it out would only lower τ, silently."""
    own = read.dflash_config
    causal = bool(read.causal) and FULL in (read.layer_types or (FULL,))
    if own.attention_sink_bias or own.attention_value_scale not in (None, 1.0) or (own.use_swa and not read.slides):
        raise ExportError(
            "plain attention, and windows named by layer_types",
            f"attention_sink_bias {own.attention_sink_bias}, attention_value_scale {own.attention_value_scale},"
            f" use_swa {own.use_swa}",
            "this version runs such drafters only in their own programs",
        )
    if causal or read.attention_bias or (read.use_sliding_window and not read.slides):
        raise ExportError(
            "layers without bias, whose slots see each other both ways where attention is full",
            f"layer_types {read.layer_types}, is_causal {read.is_causal}, causal {own.causal},"
            f" attention_bias {read.attention_bias}",
            "this version runs such drafters only in their own programs",
        )


def _rope(read: _Stock) -> dict[str, Any]:
    """The rotary settings from either layout; the base is never guessed."""
    rope: dict[str, Any] = dict(read.rope_parameters or read.rope_scaling or {})
    kind = rope.pop("type", None) or "default"
    rope = {"rope_type": kind, "rope_theta": read.rope_theta, **rope}
    _checked(_Rope, rope)
    return rope
