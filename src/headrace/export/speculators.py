"""Write a trained drafter as a checkpoint that speculators' own package loads, and `vllm serve` by itself.

In: a drafter and its target. Out: a folder with `config.json` and `model.safetensors` in speculators' layout, the same
tensors as the stock export. Embedding and head are left out, as in theirs: their package reads the target's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.codec.base import Codec
from headrace.drafter.model import Drafter
from headrace.drafter.speculators import speculators_config
from headrace.export.zlab import stock_tensors, write_folder
from headrace.target.head import FrozenHead


def export_speculators(
    drafter: Drafter,
    folder: Path,
    target: str,
    architectures: Sequence[str],
    codec: Codec | None = None,
    special_ids: Mapping[str, Any] | None = None,
    scales: Mapping[str, float] | None = None,
    head: FrozenHead | None = None,
) -> None:
    """Write the folder.

    Args:
        target: name or path of the target, kept in the config.
        architectures: the target's.
        head: the target's; needed for a reduced vocabulary.
    Raises: ExportError as `stock_tensors` and `speculators_config`; nothing is written then.
    """
    config = speculators_config(drafter.shape, target, architectures, special_ids or {}, scales or {})
    write_folder(folder, stock_tensors(drafter, codec, head), config)
