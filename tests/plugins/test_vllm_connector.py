"""The connector's two halves against a stub of what it takes from vLLM; tests/vllm runs it in the real server."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import TargetError
from headrace.target.channel import ChannelClient, ids_digest
from tests.plugins import vllm_stub
from tests.plugins.test_vllm_delivery import BLOCK, BLOCKS, COLUMNS, HIDDEN, KEY, states_of
from tests.target.test_engine_file import engine_file

LAYERS = [5, 3, 1]  # as asked


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module on the stub, which goes again with the test."""
    before = {name: mod for name, mod in sys.modules.items() if name.split(".")[0] == "vllm"}
    vllm_stub.install()
    monkeypatch.setattr(vllm_stub, "RANK", vllm_stub.Rank())
    import headrace.plugins.vllm_connector as connector

    yield connector
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("headrace.plugins.vllm_connector", None)
    sys.modules.update(before)


def config(engine: Path, **changed: Any) -> Any:
    """As much of vLLM's configuration as the connector reads."""
    extra = {"engine": str(engine)}
    hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=changed.pop("layers", LAYERS))
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, **changed}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(get_from_extra_config=extra.get),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config)),
        parallel_config=SimpleNamespace(**parallel),
    )


def groups(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def connector(module: Any, folder: Path, **changed: Any) -> Any:
    """One half; engine.json is written once."""
    if not (folder / "engine.json").exists():
        engine_file(channel=str(folder / "s")).write(folder)
    held = groups(object(), vllm_stub.HiddenStateCacheSpec())
    return module.HeadraceConnector(config(folder / "engine.json", **changed), "role", held)


def request(num_tokens: int, generated: int = 1, params: Any = None, **changed: Any) -> Any:
    ids = list(range(100, 100 + num_tokens))
    own = {
        "request_id": "r",
        "status": vllm_stub.RequestStatus.FINISHED_LENGTH_CAPPED,
        "prompt_token_ids": ids,
        "all_token_ids": [*ids, *range(7, 7 + generated)],
        "num_computed_tokens": num_tokens + generated - 1,
        "kv_transfer_params": params if params is not None else {"headrace": {"key": KEY, "kind": "states"}},
    }
    return SimpleNamespace(**{**own, **changed})


def step(scheduler: Any, worker: Any) -> set[str]:
    """One step of the engine: the scheduler's notes cross into the worker's process."""
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(scheduler.build_connector_meta(None))))
    ended = worker.get_finished(set())[0]
    worker.clear_connector_metadata()
    return ended or set()


def cache(states_TLH: torch.Tensor) -> dict[str, torch.Tensor]:
    pages = torch.full((9, COLUMNS, BLOCK, HIDDEN), 777.0)
    for token, row in enumerate(states_TLH):
        pages[BLOCKS[token // BLOCK], :, token % BLOCK] = row
    return {"cache_only": pages}


def test_a_finished_request_is_announced_kept_delivered_and_let_go(module: Any, tmp_path: Path) -> None:
    scheduler, worker = connector(module, tmp_path), connector(module, tmp_path)
    worker.register_kv_caches(cache(states_of(10)))
    keep, told = scheduler.request_finished_all_groups(request(10), ([99], BLOCKS[:3]))
    assert keep
    assert told == {"headrace": {"key": KEY, "num_tokens": 10}}
    assert step(scheduler, worker) == {"r"}
    assert step(scheduler, worker) == set()
    found = ChannelClient(tmp_path / "s", 5.0).take(KEY, 0.0)
    assert b"".join(found.parts) == states_of(10).numpy().tobytes()
    assert found.input_ids_digest == ids_digest(range(100, 110))
    worker.shutdown()
    assert not (tmp_path / "s").exists()


def test_states_are_there_before_the_next_forward_pass_which_may_be_long(module: Any, tmp_path: Path) -> None:
    scheduler, worker = connector(module, tmp_path), connector(module, tmp_path)
    worker.register_kv_caches(cache(states_of(10)))
    scheduler.request_finished_all_groups(request(10), ([99], BLOCKS[:3]))
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert ChannelClient(tmp_path / "s", 5.0).take(KEY, 0.0).num_tokens == 10
    worker.shutdown()


def test_generated_tokens_have_rows_but_the_last(module: Any, tmp_path: Path) -> None:
    params = {"headrace": {"key": KEY}, "include_output_tokens": True}
    keep, told = connector(module, tmp_path).request_finished(request(6, 4, params), BLOCKS)
    assert keep
    assert told == {"headrace": {"key": KEY, "num_tokens": 9}}


@pytest.mark.parametrize(
    "one",
    [
        request(4, params={}),
        request(4, status=vllm_stub.RequestStatus.FINISHED_ABORTED),
        request(4, status=vllm_stub.RequestStatus.FINISHED_IGNORED),
    ],
)
def test_plain_aborted_and_ignored_requests_keep_no_blocks(module: Any, tmp_path: Path, one: Any) -> None:
    scheduler = connector(module, tmp_path)
    assert scheduler.request_finished(one, BLOCKS) == (False, None)
    assert scheduler.request_finished_all_groups(one, ()) == (False, None)
    assert scheduler.build_connector_meta(None).owed == []


@pytest.mark.parametrize(
    ("one", "cause", "transient"),
    [
        (request(4, params={"headrace": {}}), "a key of 32", False),
        (request(4, params={"headrace": "text"}), "a key of 32", False),
        (request(4, params={"headrace": [1]}), "a key of 32", False),
        (request(4, params={"headrace": {"key": KEY.upper() + "X"}}), "a key of 32", False),
        (request(4, params={"headrace": {"key": KEY, "kind": "other"}}), "kind payload or states", False),
        (request(4, prompt_token_ids=None), "without token ids", False),
        (request(4, num_computed_tokens=3), "states of 3 of 4 tokens", True),
    ],
)
def test_what_cannot_be_delivered_is_told_in_the_answer(
    module: Any, tmp_path: Path, one: Any, cause: str, transient: bool
) -> None:
    scheduler = connector(module, tmp_path)
    keep, told = scheduler.request_finished(one, BLOCKS)
    assert not keep
    assert cause in told["headrace"]["error"]
    assert told["headrace"]["transient"] is transient
    assert scheduler.build_connector_meta(None).owed == []


def test_only_the_first_tensor_parallel_rank_delivers(module: Any, tmp_path: Path) -> None:
    scheduler, worker = connector(module, tmp_path), connector(module, tmp_path)
    vllm_stub.RANK.number = 1
    worker.register_kv_caches(cache(states_of(4)))
    assert not (tmp_path / "s").exists()
    scheduler.request_finished(request(4), BLOCKS)
    assert step(scheduler, worker) == set()
    assert worker.get_finished_count() == 1
    worker.shutdown()


def test_the_plain_file_form_needs_no_key(module: Any, tmp_path: Path) -> None:
    engine_file(files=str(tmp_path / "files")).write(tmp_path)
    scheduler, worker = connector(module, tmp_path), connector(module, tmp_path)
    worker.register_kv_caches(cache(states_of(5)))
    keep, told = scheduler.request_finished(request(5, params={}), BLOCKS)
    assert keep
    assert step(scheduler, worker) == {"r"}
    assert torch.equal(load_file(told["hidden_states_path"])["hidden_states"], states_of(5))


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"layers": [2, 4, 5]}, r"\[1, 3, 5\]"),
        ({"layers": None}, r"\[1, 3, 5\]"),
        ({"pipeline_parallel_size": 2}, "data parallel size 1"),
        ({"data_parallel_size": 2}, "one engine a replica"),
    ],
)
def test_an_engine_that_would_deliver_something_else_does_not_start(
    module: Any, tmp_path: Path, changed: dict[str, Any], cause: str
) -> None:
    with pytest.raises(TargetError, match=cause):
        connector(module, tmp_path, **changed)


def test_another_vllm_does_not_start(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.vllm, "__version__", "0.33.0")
    with pytest.raises(TargetError, match=r"before 0\.33"):
        connector(module, tmp_path)


def test_a_cache_of_another_shape_or_more_than_one_does_not_start(module: Any, tmp_path: Path) -> None:
    worker = connector(module, tmp_path)
    with pytest.raises(TargetError, match="columns and numbers"):
        worker.register_kv_caches({"cache_only": torch.zeros(9, COLUMNS + 1, BLOCK, HIDDEN)})
    vllm_stub.RANK.layers.append("second")
    with pytest.raises(TargetError, match="2 of them"):
        worker.register_kv_caches(cache(states_of(2)))


def test_the_group_of_states_is_found_by_its_kind(module: Any, tmp_path: Path) -> None:
    engine_file(channel=str(tmp_path / "s")).write(tmp_path)
    made = config(tmp_path / "engine.json")
    assert module.HeadraceConnector(made, "role", groups(object()))._group == 0
    with pytest.raises(TargetError, match="0 of 2"):
        module.HeadraceConnector(made, "role", groups(object(), object()))
