"""The target's frozen ends: embedding, head and final norm, read by key without loading the model.

In: a model folder and its config. Out: tensors and the three numbers that some architectures apply around them
(embedding scale, logit scale, soft cap), so that a drafter's logits are the target's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.errors import TargetError
from headrace.prepare.model_files import CONFIG
from headrace.target.weights import Weights

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_HEADS = (
    "lm_head.weight",
    "model.lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
)

# Architectures whose ends are plain; anything else is refused by name rather than guessed.
_PLAIN = frozenset(
    "deepseek_v3 glm glm4 glm4_moe glm_moe_dsa gpt_oss llama minimax_m2 mistral mixtral olmo2 phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3".split()
)
# Their RMS norms store weights less one. Gemma 4 and Gemma 3n no longer do.
_LESS_ONE = frozenset("gemma gemma2 gemma3_text qwen3_5_moe_text qwen3_5_text qwen3_next".split())
_WHOLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """What turns ids into a drafter's inputs, and its outputs into logits; never trained.

    `embedding_VH`, `head_VH` in the target's dtype (one tensor when tied); `norm_H` the final norm's weight as stored.
    Inputs are embedding rows times `embedding_scale`; logits are products times `logit_scale`, then, with a softcap c,
    c * tanh(logits / c). `norm_eps` is that of a final RMS norm, None for another kind; its weight is `norm_H` plus
    `norm_offset` (Gemma stores weights less one).
    """

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    norm_H: torch.Tensor
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    norm_eps: float | None = None
    norm_offset: float = 0.0

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """The final norm of a last state [..., H] taken before it, in float32, returned in the head's dtype.

        Raises: TargetError for an architecture whose final norm is not an RMS norm.
        """
        if self.norm_eps is None:
            raise TargetError("a target whose final norm is an RMS norm", "another", "store final:post_norm instead")
        wide = final.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        return (normed * (self.norm_H.float() + self.norm_offset)).to(self.head_VH.dtype)

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.embedding_VH is self.head_VH

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "FrozenHead":
        """The same head elsewhere, or in another dtype; a tied one stays tied."""
        embedding = self.embedding_VH.to(device=device, dtype=dtype)
        head = embedding if self.tied else self.head_VH.to(device=device, dtype=dtype)
        norm = self.norm_H.to(device=device, dtype=dtype)
        return replace(self, embedding_VH=embedding, head_VH=head, norm_H=norm)


def load_head(folder: Path, config: Any) -> FrozenHead:
    """Read a target's frozen ends.

    Args:
        config: the target's transformers config (`AutoConfig.from_pretrained(folder)`).
    Raises: TargetError for an architecture whose ends are not known, a key that is missing (listing what was looked
    for), or a head that is quantised.
    """
    text = config.get_text_config()
    scales = _scales(text)
    weights = Weights(folder)
    embedding = weights.read([f"{prefix}embed_tokens.weight" for prefix in _PREFIXES], "embedding")
    norm = weights.read([f"{prefix}norm.weight" for prefix in _PREFIXES], "final norm")
    # A multimodal config may say it at its top alone, and then there is no head to be read.
    tied = text.tie_word_embeddings or (config.tie_word_embeddings and weights.find(_HEADS) is None)
    head = embedding if tied else weights.read(_HEADS, "head")
    shape = [text.vocab_size, text.hidden_size]
    for name, tensor, expected in (("embedding", embedding, shape), ("head", head, shape), ("norm", norm, shape[1:])):
        if list(tensor.shape) != expected or tensor.dtype not in _WHOLE:
            raise TargetError(
                f"a floating-point {name} {expected} as {folder / CONFIG} says",
                f"{list(tensor.shape)} in {tensor.dtype}",
                "give the folder of the unquantised model, or of one that leaves embedding and head whole",
            )
    return FrozenHead(embedding, head, norm, **scales, **_norm(text))


def check_ends(config: Any) -> None:
    """Raise TargetError for an architecture whose embedding scale, logit scale and soft cap are not known."""
    _scales(config.get_text_config())


def _norm(config: Any) -> dict[str, float]:
    """What the final norm computes; Cohere's is a layer norm."""
    if "rms_norm_eps" not in config or str(config.model_type).startswith("cohere"):
        return {}
    return {"norm_eps": config.rms_norm_eps, "norm_offset": 1.0 if config.model_type in _LESS_ONE else 0.0}


def _scales(config: Any) -> dict[str, float]:
    """The numbers an architecture applies around its ends; source: the modelling code of each in transformers."""
    kinds: dict[str, Callable[[Any], dict[str, float]]] = {
        "gemma": _gemma,
        "gemma2": _gemma,
        "gemma3_text": _gemma,
        "gemma4_text": _gemma,
        "granite": lambda c: {"embedding_scale": c.embedding_multiplier, "logit_scale": 1 / c.logits_scaling},
        "cohere": lambda c: {"logit_scale": c.logit_scale},
        "cohere2": lambda c: {"logit_scale": c.logit_scale},
    }
    if config.model_type in kinds:
        return kinds[config.model_type](config)
    if config.model_type not in _PLAIN:
        raise TargetError(
            f"a model type whose embedding and head are known ({', '.join(sorted({*_PLAIN, *kinds}))})",
            str(config.model_type),
            "check how it scales embeddings and logits, then add it to target/head.py",
        )
    return {}


def _gemma(config: Any) -> dict[str, float]:
    """Gemma multiplies embeddings by sqrt(hidden), rounded to the weights' dtype; some cap their logits."""
    scale = torch.tensor(config.hidden_size**0.5, dtype=config.dtype or torch.float32).item()
    cap = config.final_logit_softcapping if "final_logit_softcapping" in config else None
    return {"embedding_scale": scale} | ({} if cap is None else {"softcap": cap})
