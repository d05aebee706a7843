"""What the connector takes from vLLM, where vLLM is not installed: the same names, the least behind them."""

import enum
import sys
import types
from dataclasses import dataclass, field
from typing import Any

VERSION = "0.32.0"


class KVConnectorBase_V1:
    """Holds the metadata of a step, as vLLM's does."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None


class RequestStatus(enum.Enum):
    """The ends of a request that matter here."""

    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_IGNORED = 4


class HiddenStateCacheSpec:
    """Marks the group of blocks that holds states."""


@dataclass
class Rank:
    """What the stub says of this process's place among tensor-parallel ranks."""

    number: int = 0
    layers: list[str] = field(default_factory=lambda: ["cache_only"])


RANK = Rank()


def install() -> None:
    """Put the stub where `import vllm` finds it, unless vLLM is there."""
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    _module("vllm", __version__=VERSION)
    for name in (
        "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
        "vllm.distributed.kv_transfer.kv_connector.v1", "vllm.model_executor", "vllm.model_executor.models", "vllm.v1",
    ):  # fmt: skip
        _module(name)
    _module("vllm.config", get_layers_from_vllm_config=lambda config, kind, names: dict.fromkeys(RANK.layers))
    _module(base, KVConnectorBase_V1=KVConnectorBase_V1, KVConnectorMetadata=object, SupportsHMA=object)
    _module("vllm.distributed.parallel_state", get_tensor_model_parallel_rank=lambda: RANK.number)
    _module("vllm.model_executor.models.extract_hidden_states", CacheOnlyAttentionLayer=object)
    _module("vllm.v1.kv_cache_interface", HiddenStateCacheSpec=HiddenStateCacheSpec)
    _module("vllm.v1.request", RequestStatus=RequestStatus)


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
