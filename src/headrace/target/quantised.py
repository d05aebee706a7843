"""How a model folder's weights are quantised, as the folder itself says it.

In: a model folder. Out: the method by name, the text that identifies it in a store's manifest, and what to do where
this machine cannot run such weights. States of quantised weights are not those of the originals, so the two never mix.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import TargetError
from headrace.prepare.model_files import CONFIG, Reading, check_json

MODELOPT = "hf_quant_config.json"
_FORMATS = {"nvfp4-pack-quantized": "NVFP4", "float-quantized": "FP8", "pack-quantized": "packed integers"}


@dataclass(frozen=True)
class Quantisation:
    """What is known of a folder's quantisation.

    `method` is its common name (fp8, awq, gptq, mxfp4, NVFP4, ...), None for whole weights; `identity` goes into the
    manifest; `hint` says what to do where the model does not load, and is empty for whole weights.
    """

    method: str | None
    identity: str

    @property
    def hint(self) -> str:
        """What to do when weights of this kind do not load here."""
        if self.method is None:
            return ""
        return (
            f"these weights are quantised ({self.method}), which transformers does not run on every machine: capture "
            "where it does, or from the unquantised model if that is the one to be served"
        )


def read_quantisation(folder: Path) -> Quantisation:
    """Recognise quantised weights by `quantization_config` in config.json, or by ModelOpt's own file beside it.

    Raises: TargetError for a file that is no JSON object.
    """
    config = check_json(folder / CONFIG)
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found and (folder / MODELOPT).is_file():
        own = check_json(folder / MODELOPT).get("quantization", {})
        found = {"quant_method": "modelopt", **own} if isinstance(own, dict) else {"quant_method": "modelopt"}
    if not isinstance(found, Mapping) or not found:
        return Quantisation(None, "none")
    return Quantisation(_method(found), json.dumps(dict(found), sort_keys=True, default=str))


def check_runs(found: Quantisation, folder: Path) -> None:
    """Raise TargetError for a kind that transformers does not know: it would pass over it, and read packed numbers."""
    if found.method is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    expected = f"weights in {folder} that transformers can run"
    with Reading(expected, found.hint):
        known = AutoHfQuantizer.supports_quant_method(json.loads(found.identity))
    if not known:
        raise TargetError(expected, f"{found.method}, which it does not know", found.hint)


def _method(found: Mapping[str, Any]) -> str:
    """ModelOpt and compressed-tensors each hold several kinds."""
    method = str(found.get("quant_method", "an unnamed method"))
    if method == "modelopt":
        return str(found.get("quant_algo", method))
    if method == "compressed-tensors":
        return _FORMATS.get(str(found.get("format")), f"{method} {found.get('format', '')}".strip())
    return method
