"""What a run trains: a drafter, the frozen ends of its target, and the samples.

In: a run file and a run's folder. Out: these parts, checked to belong together (states, prepared set and the target's
head), and the identity that a resumed run must share. The target itself is never loaded. The floor opens no store.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.codec.base import Codec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec
from headrace.config import OrderConfig, RunFile, RunFolder, TrainConfig
from headrace.drafter.derive import Derived, derive
from headrace.drafter.draft_vocabulary import DraftVocabulary, reduced, settle
from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.drafter.speculators import load_any
from headrace.drafter.stock import WEIGHTS
from headrace.drafter.warm import start_from
from headrace.errors import TrainError
from headrace.prepare.model_files import load_config, load_generation_config, load_tokenizer
from headrace.prepare.prepared import PreparedSet
from headrace.record import digest
from headrace.source import Source
from headrace.store.remote import open_source
from headrace.store.verify import BASIS_NAME
from headrace.stream.client import StreamSource
from headrace.taps import Tap, default_taps, feature_taps, parse_taps
from headrace.target.demo import DEMO_MASK_TOKEN_ID
from headrace.target.device import choose_device, fast_bfloat16
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import target_folder
from headrace.target.unused import unused_row
from headrace.target.weights import weights_hash
from headrace.token_rule import ALL_TOKENS, TokenRule
from headrace.train.batches import Plan, Reader, plan_steps
from headrace.train.scale import measure_feature_scale

# Settings that change when a run is saved or shown, never what it learns.
FREE_SETTINGS = frozenset({"save_seconds", "read_ahead", "map_shards", "tensorboard", "threads", "trackers"})
ROLES = ("mask", "pad", "eos", "bos")


@dataclass(frozen=True, eq=False)
class Parts:
    """Everything a run needs; `source` and `codec` are None for the floor.

    `train` are the run's settings with nothing left to decide; `made_from` goes into every checkpoint, `identity` into
    stage.json; `reasons` say why the drafter has the shape it has; `start` is the drafter it goes on from, if any;
    `rule` says which tokens have states.
    """

    train: TrainConfig
    shape: DrafterShape
    head: FrozenHead
    prepared: PreparedSet
    plan: Plan
    source: Source | None
    codec: Codec | None
    device: torch.device
    made_from: dict[str, Any]
    identity: dict[str, Any]
    reasons: tuple[str, ...] = ()
    start: Drafter | None = None
    rule: TokenRule = ALL_TOKENS
    vocabulary: DraftVocabulary | None = None

    @property
    def reader(self) -> Reader:
        """Samples with features."""
        return Reader(self.prepared, self.source, self.codec, self.shape.num_features, self.rule)

    def new_drafter(self, seed: int, told: Callable[[str], None] | None = None) -> Drafter:
        """An untrained drafter on the run's device, its feature scale measured unless train.scale_taps is off.

        Args: told: is told what a drafter that is gone on from loses in the codec's coordinates.
        """
        drafter = Drafter(self.shape, seed)
        if self.source is not None and self.train.scale_taps:
            scale_F = measure_feature_scale(self.reader, self.prepared, self._num_scales())
            drafter.feature_scale.copy_(scale_F)
        if self.vocabulary is not None:
            self.vocabulary.give(drafter)
        if self.start is not None:
            lost = start_from(drafter, self.start, self.codec)
            if told is not None and self.codec is not None:
                told(f"of its fc's energy, the codec's directions hold {1 - lost**2:.2%} and lose {lost**2:.2%}")
        return drafter.to(self.device)

    def _num_scales(self) -> int:
        """Scales of the drafter's features: without a last state's columns, which are one tap of the codec's."""
        assert self.codec is not None
        return self.codec.num_scales * self.shape.num_features // self.codec.num_features

    def close(self) -> None:
        """Release the store."""
        if self.source is not None:
            self.source.close()


def assemble(cfg: RunFile, folder: RunFolder, features: bool) -> Parts:
    """Open what a run file names and check that it belongs together.

    Args:
        features: False assembles the floor.
    Raises: TrainError when states are of another prepared set or target; PrepareError, StoreError, TargetError,
    DrafterError for parts that are missing or cannot be used.
    """
    prepared = PreparedSet.open(folder.prepared)
    model = target_folder(cfg.target.model)
    config = load_config(model)
    num_blocks = int(config.get_text_config().num_hidden_layers)
    weights = weights_hash(model)
    source: Source | None = None
    codec: Codec | None = None
    stored: tuple[Tap, ...] = ()
    rule = ALL_TOKENS
    if features:
        source = _open_source(cfg, folder)
        manifest = source.manifest()["identity"]
        _check_states(manifest, prepared, weights)
        codec = open_codec(CodecSpec.from_json(manifest["codec"]), folder.states)
        stored = parse_taps(manifest["taps"], num_blocks)
        rule = TokenRule.parse(manifest["token_rule"])
        taps = feature_taps(stored)
        num_features = codec.num_features * len(taps) // len(stored)
    else:
        named = cfg.target.taps
        taps = parse_taps(named, num_blocks) if named else default_taps(num_blocks, cfg.target.num_taps)
        num_features = len(taps) * int(config.get_text_config().hidden_size)
    start = _start(cfg, num_blocks)
    derived = _derived(cfg, model, config, taps, num_features, features, start)
    _check_objective(cfg.train, source is not None and len(taps) < len(stored))
    _check_window(rule, derived.shape)
    device = choose_device(cfg.target.device)
    train = cfg.train if cfg.train.autocast is not None else _decide_autocast(cfg.train, device)
    head = load_head(model, config).to(device, torch.bfloat16 if train.autocast else torch.float32)
    size, shape, reasons = cfg.drafter.draft_vocabulary, derived.shape, derived.reasons
    always = [] if size is None else special_ids(model, config)["eos"]
    vocabulary = settle(size, start, prepared, shape.vocab_size, always)
    if vocabulary is not None:
        shape, head = vocabulary.shape(shape), reduced(head, vocabulary.ids_D)
        reasons = (*reasons, f"drafter.draft_vocabulary {vocabulary.coverage}")
    made_from = {
        "shape": shape.to_json(),
        "features": features,
        "codec": codec.spec.to_json() if codec is not None else None,
        "prepared": prepared.fingerprint,
        "target": {"model": cfg.target.model, "weights_hash": weights},
    }
    identity = {**made_from, "target": {"weights_hash": weights}, **_settings(cfg.order, train)}  # a model may move
    if cfg.drafter.init_from is not None:
        identity["drafter.init_from"] = digest((Path(cfg.drafter.init_from).expanduser() / WEIGHTS).read_bytes()).hex()
    plan = plan_steps(prepared, cfg.order, train)
    own = (made_from, identity, reasons, start, rule, vocabulary)
    return Parts(train, shape, head, prepared, plan, source, codec, device, *own)


def _open_source(cfg: RunFile, folder: RunFolder) -> Source:
    """The servers that the run file names, else the store; a fitted basis comes into the run's folder of states."""
    if cfg.source is None:
        return open_source(cfg.store.at, folder.states, cfg.train.read_ahead, cfg.train.map_shards)
    source = StreamSource(cfg.source, cfg.stream, log=folder.root / "stream.jsonl")
    source.basis(folder.states / BASIS_NAME)
    return source


def _start(cfg: RunFile, num_blocks: int) -> Drafter | None:
    """The drafter that the run goes on from, if any."""
    return None if cfg.drafter.init_from is None else load_any(Path(cfg.drafter.init_from).expanduser(), num_blocks)


def _derived(
    cfg: RunFile,
    model: Path,
    config: Any,
    taps: Sequence[Tap],
    num_features: int,
    features: bool,
    start: Drafter | None,
) -> Derived:
    wanted = cfg.drafter.model_copy(update={"features": features, "mask_token_id": _mask_token(cfg)})
    ids = {**special_ids(model, config), "unused": _unused(model, config)}
    return derive(wanted, config, list(map(str, taps)), num_features, ids, None if start is None else start.shape)


def _check_objective(cfg: TrainConfig, has_final: bool) -> None:
    if cfg.objective != "ce" and not has_final:
        raise TrainError(
            f"the target's last states, for train.objective {cfg.objective}",
            "none in the store (the floor reads no store at all)",
            "capture with capture.final_state true; or train with objective ce, or with floor false",
        )


def _check_window(rule: TokenRule, shape: DrafterShape) -> None:
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    if rule.window is not None and any(window is None or window.size > rule.window for window in windows):
        raise TrainError(
            f"layers that see less than {rule.window} tokens back: earlier ones have no states (token rule {rule})",
            f"windows {', '.join('none' if w is None else str(w.size) for w in windows)}",
            "set drafter.sliding_window and drafter.layer_types so; or capture without capture.window",
        )


def _decide_autocast(cfg: TrainConfig, device: torch.device) -> TrainConfig:
    return cfg.model_copy(update={"autocast": fast_bfloat16(device)})


def special_ids(model: Path, config: Any) -> dict[str, list[int]]:
    """Ids by role (mask, pad, eos, bos), from the target's config, generation config and tokenizer together."""
    found: dict[str, set[int]] = {role: set() for role in ROLES}
    text = config.get_text_config()
    holders = [text.to_dict(), config.to_dict()]
    generation = load_generation_config(model)
    if generation is not None:
        holders.append(generation.to_dict())
    if (model / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(model)
        holders.append({"mask_token_id": tokenizer.mask_token_id, "pad_token_id": tokenizer.pad_token_id})
        holders.append({"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id})
    for holder in holders:
        for role in ROLES:
            value = holder.get(f"{role}_token_id")
            if value is not None:
                found[role].update(value if isinstance(value, list) else [value])
    return {role: sorted(ids) for role, ids in found.items()}


def _unused(model: Path, config: Any) -> list[int]:
    """A row of the embedding that no text produces, if there is one and a tokenizer to say so."""
    if not (model / "tokenizer_config.json").exists():
        return []
    row = unused_row(load_tokenizer(model), int(config.get_text_config().vocab_size))
    return [] if row is None else [row]


def _mask_token(cfg: RunFile) -> int | None:
    if cfg.drafter.mask_token_id is None and cfg.target.model == "demo":
        return DEMO_MASK_TOKEN_ID
    return cfg.drafter.mask_token_id


def _check_states(manifest: Mapping[str, Any], prepared: PreparedSet, own: str) -> None:
    if manifest["prepared"] != prepared.fingerprint:
        raise TrainError(
            f"states of the prepared set {prepared.fingerprint}", str(manifest["prepared"]), "capture this prepared set"
        )
    if manifest["target"]["weights_hash"] != own:
        raise TrainError(
            f"the head of the target whose states these are (weights {manifest['target']['weights_hash']})",
            f"weights {own}",
            "set target.model to the model that was captured, or capture again",
        )


def _settings(order: OrderConfig, train: TrainConfig) -> dict[str, Any]:
    """Settings that decide what is learned, by dotted path."""
    own = {f"train.{k}": v for k, v in train.model_dump(mode="json").items() if k not in FREE_SETTINGS}
    return {**own, **{f"order.{k}": v for k, v in order.model_dump(mode="json").items()}}
