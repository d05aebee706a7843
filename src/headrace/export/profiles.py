"""What each engine reads of a stock drafter's config, as named profiles with the version they were read from.

In: a drafter's `config.json`. Out: what an engine would not serve as it was trained, key by key; nothing where all is
well. A key that no list knows is refused: an engine that passes over it serves another drafter, silently. Profiles
were made by reading the engines' sources; a static one has not been checked against a running engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.drafter.shape import FULL, SLIDING
from headrace.errors import ExportError

_QWEN3 = frozenset(
    "architectures attention_bias attention_dropout bos_token_id dtype eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size layer_types max_position_embeddings max_window_layers model_type "
    "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps rope_parameters rope_scaling "
    "rope_theta sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size".split()
)
# Draft tokens are the largest logits: what rises with every logit alike does not change them.
_HARMLESS = {"final_logit_softcapping", "output_multiplier"}


@dataclass(frozen=True)
class Profile:
    """One engine's reading of a drafter.

    `version` is where it was read; `static` says that no running engine has confirmed it. `keys` and `own` are the
    keys of the config and of `dflash_config` that it reads or may pass over; `not_read` keys change the drafter's
    inputs and are not read; `both_ways` says whether slots of sliding layers can see later ones, `reduced` whether it
    reads a reduced vocabulary's mapping.
    """

    name: str
    version: str
    static: bool
    keys: frozenset[str]
    own: frozenset[str]
    not_read: frozenset[str]
    both_ways: bool
    reduced: bool

    @property
    def title(self) -> str:
        """Name, version, and whether it was ever run."""
        return f"{self.name} ({self.version}{'; static: not run against the engine' if self.static else ''})"


# Both engines read the same keys, in the versions named.
_KEYS = _QWEN3 | {
    "block_size", "dflash_config", "draft_vocab_hash", "draft_vocab_size", "is_causal", "num_target_layers",
}  # fmt: skip
_OWN = frozenset({"block_size", "causal", "mask_token_id", "swa_window_size", "target_layer_ids", "use_swa"})
_NOT_READ = frozenset({"input_embedding_scale"})

PROFILES: Mapping[str, Profile] = {
    "vllm": Profile(
        "vllm",
        "0.32.0, run on a CPU; main at 036a00d1f5d0, vllm/model_executor/models/qwen3_dflash.py",
        False,
        _KEYS,
        _OWN,
        _NOT_READ,
        True,
        True,
    ),
    "sglang": Profile(
        "sglang",
        "main at 003b23d7388e, python/sglang/srt/models/dflash.py",
        True,
        _KEYS,
        _OWN,
        _NOT_READ,
        False,
        False,
    ),
}


def profile(name: str) -> Profile:
    """A profile by its name. Raises: ExportError."""
    if name not in PROFILES:
        raise ExportError(f"a profile ({', '.join(PROFILES)})", name, "name one of them")
    return PROFILES[name]


def problems(config: Mapping[str, Any], engine: Profile) -> list[str]:
    """Why an engine would not serve a drafter as it was trained; empty where it would.

    Raises: ExportError for a key that the profile has never heard of.
    """
    own = config["dflash_config"]
    unknown = [key for key in config if key not in engine.keys]
    unknown += [f"dflash_config.{key}" for key in own if key not in engine.own | engine.not_read | _HARMLESS]
    if unknown:
        raise ExportError(
            f"keys that the profile {engine.name} knows",
            ", ".join(sorted(unknown)),
            "look up what the engine does with them, then add them to export/profiles.py",
        )
    found = [
        f"dflash_config.{key} {own[key]:g} is not read for {config['architectures'][0]}: its blocks would begin from "
        "embeddings of another scale"
        for key in sorted(engine.not_read & own.keys())
    ]
    kinds = set(config["layer_types"])
    if SLIDING in kinds and config.get("is_causal") is False and not engine.both_ways:
        found.append(
            f"layers of {SLIDING} run causally there, whatever the config says; these were trained both ways "
            "(drafter.sliding_causal false)"
        )
    if config.get("draft_vocab_size") is not None and not engine.reduced:
        found.append("a reduced vocabulary's mapping is passed over there: it would draft from the target's whole head")
    return found


def environment(config: Mapping[str, Any], engine: Profile) -> dict[str, str]:
    """Variables that an engine needs for this drafter."""
    mixed = {FULL, SLIDING} <= set(config["layer_types"])
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if engine.name == "vllm" and mixed else {}
