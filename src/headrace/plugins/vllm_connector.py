"""The vLLM connector: captured states of a request, out of the engine's cache and onto headrace's channel.

In: requests whose `kv_transfer_params` hold `headrace: {key, kind}`, on an engine started with the method
`extract_hidden_states`; `vllm serve` loads this module by `kv_connector_module_path`, nothing of vLLM is patched. Out:
one delivery a key on the channel of `engine.json`, or the cause why there is none; with `files` there, one file a
request instead. The scheduler's half notes what a finished request is owed; the worker's half delivers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from headrace.errors import TargetError
from headrace.plugins.vllm_delivery import Deliverer, Lane, PagedStates, Wanted
from headrace.target.engine_file import EngineFile
from headrace.target.vllm_command import PARAMS, check_version

if TYPE_CHECKING:
    from vllm.v1.request import Request

_KEY_DIGITS = 32
_NO_ANSWER = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED)


@dataclass(frozen=True)
class Owed:
    """What a finished request is owed, and the blocks where it lies; `file` in the plain file form."""

    request_id: str
    wanted: Wanted
    block_ids: list[int]
    file: str | None = None


@dataclass
class OwedStates(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler's half to the worker's, with each step."""

    owed: list[Owed] = field(default_factory=list)


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """`kv_connector` of `vllm serve`; its extra setting `engine` is the path of `engine.json`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises: TargetError for another version of vLLM, other layers than engine.json's, or a layout of ranks that
        this connector does not know; ConfigError for an engine.json that does not read."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version(vllm.__version__)
        self._path = Path(self._kv_transfer_config.get_from_extra_config("engine", ""))
        self._engine = EngineFile.read(self._path)
        _check_layers(vllm_config, self._engine)
        _check_ranks(vllm_config.parallel_config)
        self._group = _group(kv_cache_config)
        self._owed: list[Owed] = []  # the scheduler's half
        self._cache: torch.Tensor | None = None  # the worker's half, on the rank that delivers
        self._deliverer: Deliverer | None = None
        self._lane: Lane | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """All columns of a token side by side."""
        return "LBNHC"

    def get_finished_count(self) -> int:
        """One rank delivers, so one report ends a request."""
        return 1

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: "Request", blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Pass on what was noted since the last step."""
        owed, self._owed = self._owed, []
        return OwedStates(owed)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished, with the blocks of every group; none where the request never ran."""
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note what the request is owed.

        Returns: whether its blocks must be kept, and what its answer says in `kv_transfer_params`.
        """
        params = request.kv_transfer_params or {}
        own = params.get(PARAMS)
        if request.status in _NO_ANSWER or (own is None and self._engine.files is None):
            return False, None
        ids = request.all_token_ids[:-1] if params.get("include_output_tokens") else request.prompt_token_ids
        wrong = _wrong(own, ids, request.num_computed_tokens, self._engine.files is not None)
        if wrong is not None:
            cause, transient = wrong
            key = own.get("key") if isinstance(own, dict) else None
            return False, {PARAMS: {"key": key, "error": cause, "transient": transient}}
        input_ids = np.array(ids, dtype=np.int32)
        if self._engine.files is not None:
            file = str(Deliverer.new_file(Path(self._engine.files)))
            wanted = Wanted(request.request_id, "states", input_ids)
            self._owed.append(Owed(request.request_id, wanted, list(block_ids), file))
            return True, {"hidden_states_path": file}
        assert own is not None
        wanted = Wanted(own["key"], own.get("kind", "payload"), input_ids)
        self._owed.append(Owed(request.request_id, wanted, list(block_ids)))
        return True, {PARAMS: {"key": wanted.key, "num_tokens": len(input_ids)}}

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of states; on the first rank, open the channel.

        Raises: TargetError for a cache of another shape than engine.json's columns; what Deliverer raises.
        """
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            hint = "start the engine with headrace engine"
            raise TargetError("one layer that keeps captured states", f"{len(layers)} of them", hint)
        if get_tensor_model_parallel_rank() != 0:
            return
        cache = kv_caches[next(iter(layers))]
        expected = (self._engine.num_states, self._engine.hidden_size)
        if (cache.shape[1], cache.shape[3]) != expected:
            hint = "write engine.json anew: run headrace engine"
            raise TargetError(f"a cache of {expected} columns and numbers", str(list(cache.shape)), hint)
        self._cache, self._lane = cache, Lane(cache.device)
        self._deliverer = Deliverer(self._path, cache.device)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Deliver what is owed: before the step's forward pass, which may be a long prefill of others."""
        super().bind_connector_metadata(connector_metadata)
        if self._deliverer is not None and self._cache is not None:
            for owed in connector_metadata.owed:
                self._deliver(owed, self._deliverer, PagedStates(self._cache, owed.block_ids))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The engine keeps the states itself; they are read when the request has finished."""

    def wait_for_save(self) -> None:
        """Nothing is written during a forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns: requests whose states were delivered, and whose blocks may go to others."""
        return (None if self._lane is None else self._lane.ended() or None), None

    def shutdown(self) -> None:
        """Wait for deliveries on their way, then remove the socket."""
        if self._lane is not None:
            self._lane.close()
        if self._deliverer is not None:
            self._deliverer.close()

    def _deliver(self, owed: Owed, deliverer: Deliverer, paged: PagedStates) -> None:
        assert self._lane is not None
        if owed.file is None:
            self._lane.submit(owed.request_id, lambda: deliverer.deliver(owed.wanted, paged))
        else:
            file = Path(owed.file)
            self._lane.submit(owed.request_id, lambda: deliverer.write(file, owed.wanted.input_ids, paged))


def _wrong(own: Any, ids: Sequence[int] | None, num_computed: int, to_file: bool) -> tuple[str, bool] | None:
    """Why a request cannot be delivered, and whether another try may help."""
    if not ids:
        return "a request without token ids; send the prompt as ids", False
    if num_computed < len(ids):
        return f"states of {num_computed} of {len(ids)} tokens", True
    if to_file:
        return None
    key = own.get("key") if isinstance(own, dict) else None
    if not isinstance(key, str) or len(key) != _KEY_DIGITS or not set(key) <= set("0123456789abcdef"):
        return f"a key of {_KEY_DIGITS} hexadecimal digits is needed in kv_transfer_params.{PARAMS}", False
    if own.get("kind", "payload") not in ("payload", "states"):
        return "kind payload or states is needed", False
    return None


def _check_layers(vllm_config: Any, engine: EngineFile) -> None:
    speculative = vllm_config.speculative_config
    config = None if speculative is None else speculative.draft_model_config.hf_config
    found = sorted(set(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or []))
    if found != engine.layer_ids:
        hint = "start the engine with headrace engine, which writes both"
        raise TargetError(f"layers {engine.layer_ids}, those of engine.json", str(found), hint)


def _check_ranks(parallel: Any) -> None:
    found = {name: getattr(parallel, name) for name in ("pipeline_parallel_size", "data_parallel_size")}
    if any(size != 1 for size in found.values()):
        hint = "use tensor parallelism within an engine, and start one engine a replica (headrace engine --name)"
        raise TargetError("pipeline and data parallel size 1", str(found), hint)


def _group(kv_cache_config: Any) -> int:
    """The group of blocks that holds the states; hybrid targets have several, of different block sizes."""
    groups = kv_cache_config.kv_cache_groups
    found = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0
    raise TargetError(
        "one group of blocks for captured states", f"{len(found)} of {len(groups)}", "see docs/engines.md"
    )
