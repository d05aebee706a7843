"""States from a real vLLM server on the CPU, beside transformers: right, complete, and told about when they are not."""

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import urllib3

from headrace.codec.base import TORCH_DTYPES
from headrace.codec.registry import open_codec
from headrace.config import TargetConfig
from headrace.taps import Tap, parse_tap
from headrace.target.channel import Delivery, DeliveryError
from headrace.target.endpoints import Endpoint, Request
from headrace.target.transformers_target import TransformersTarget, load_target
from tests.vllm.servers import TAPS, ask, endpoint, engine, run_file

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FLOAT32 = 1e-4  # relative Frobenius error; measured below 3e-6
BOUND = 4 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = run_file(tmp_path_factory.mktemp("vllm"), queue_bytes=BOUND)
    with engine(path):
        yield endpoint(path)


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return load_target(TargetConfig(model="demo", dtype="float32", device="cpu"))


def ids_of(seed: int, size: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(100, 49_000, size).tolist())


def columns(served: Endpoint, delivery: Delivery) -> torch.Tensor:
    """Raw states [T, columns, H]."""
    dtype, shape = TORCH_DTYPES[delivery.dtype], (-1, served.file.num_states, served.file.hidden_size)
    return torch.cat([torch.frombuffer(bytearray(part), dtype=dtype).view(shape) for part in delivery.parts])


def reference(target: TransformersTarget, ids: tuple[int, ...], taps: list[Tap]) -> torch.Tensor:
    return target.states([np.array(ids, dtype=np.int32)], taps, len(ids))[0]


def error(found_TLH: torch.Tensor, wanted_TLH: torch.Tensor) -> float:
    """Largest over taps; without token 0, whose norm would hide a fault in all others."""
    assert found_TLH.shape == wanted_TLH.shape
    lost_L = (found_TLH - wanted_TLH)[1:].float().norm(dim=(0, 2)) / wanted_TLH[1:].float().norm(dim=(0, 2))
    return float(lost_L.max())


def states(served: Endpoint, ids: tuple[int, ...], **more: Any) -> torch.Tensor:
    answer = served.ask(Request(ids, kind="states", **more))
    assert answer.delivery is not None
    return columns(served, answer.delivery)


def check(served: Endpoint, target: TransformersTarget, ids: tuple[int, ...]) -> None:
    taps = [parse_tap(name) for name in served.file.taps]
    assert error(states(served, ids), reference(target, ids, taps)) < FLOAT32


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 130])
def test_every_column_is_what_transformers_gives(served: Endpoint, target: TransformersTarget, size: int) -> None:
    ids = ids_of(size, size)
    if size > 1:
        check(served, target, ids)
    else:  # nothing but token 0
        found, taps = states(served, ids), [parse_tap(name) for name in served.file.taps]
        assert torch.allclose(found, reference(target, ids, taps), rtol=1e-3, atol=1e-2)


def test_a_prefill_longer_than_a_chunk_is_whole(served: Endpoint, target: TransformersTarget) -> None:
    check(served, target, ids_of(3, 1300))  # chunks of 512


def test_a_prompt_again_and_one_that_shares_its_beginning(served: Endpoint, target: TransformersTarget) -> None:
    first = ids_of(5, 200)
    once, again = states(served, first), states(served, first)  # the second from the prefix cache
    assert error(again, once) < FLOAT32
    check(served, target, (*first[:150], *ids_of(6, 60)))


def test_many_at_once_are_not_mixed_up(served: Endpoint, target: TransformersTarget) -> None:
    asked = [ids_of(20 + n, 20 + 13 * n) for n in range(6)]
    found: dict[int, torch.Tensor] = {}

    def ask(n: int) -> None:
        found[n] = states(served, asked[n])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taps = [parse_tap(name) for name in served.file.taps]
    for n, ids in enumerate(asked):
        assert error(found[n], reference(target, ids, taps)) < FLOAT32


def test_the_payload_is_the_codecs_own_in_the_runs_order_of_taps(served: Endpoint, target: TransformersTarget) -> None:
    ids = ids_of(7, 90)
    delivery = served.ask(Request(ids, kind="payload")).delivery
    assert delivery is not None
    assert served.file.spec is not None
    codec = open_codec(served.file.spec)
    found = torch.cat(
        [codec.features(part, end - start) for part, (start, end) in zip(delivery.parts, delivery.spans, strict=True)]
    )
    taps = [parse_tap(name) for name in TAPS]
    wanted = reference(target, ids, taps)
    assert delivery.num_bytes < wanted.numel() * 4 / 3.8
    assert error(codec.reconstruct(found), wanted) < 0.02  # of 8 bits


@pytest.mark.parametrize("logprobs", [None, 1], ids=["plain", "proved"])
def test_an_answer_and_the_states_of_it_in_one_request(
    served: Endpoint, target: TransformersTarget, logprobs: int | None
) -> None:
    """Also of a request that regenerate.with_states proves by the prompt's logprobs."""
    prompt = ids_of(8, 40)
    asked = Request(prompt, kind="states", max_tokens=12, output_states=True, prompt_logprobs=logprobs)
    answer = served.ask(asked)
    assert len(answer.prompt_logprobs) == (0 if logprobs is None else len(prompt))
    assert answer.delivery is not None
    whole = (*prompt, *answer.output_ids)
    assert answer.delivery.num_tokens == len(whole) - 1
    taps = [parse_tap(name) for name in served.file.taps]
    assert error(columns(served, answer.delivery), reference(target, whole[:-1], taps)) < FLOAT32


def test_a_request_without_states_leaves_nothing_behind(served: Endpoint) -> None:
    answer = served.ask(Request(ids_of(9, 30), kind=None, max_tokens=3))
    assert len(answer.output_ids) == 3
    assert answer.delivery is None


def raw(served: Endpoint, ids: tuple[int, ...], key: str, timeout: float = 300, **more: Any) -> dict[str, Any]:
    """A request whose delivery nobody takes."""
    body = Request(ids, kind="states").body(served.file.model, key) | more
    return ask(served.file.url, body, timeout)


def test_a_full_queue_fails_the_request_for_now_and_passes_when_taken(served: Endpoint) -> None:
    keys = [uuid.uuid4().hex for _ in range(3)]  # 1.8 MB each; the queue holds 4
    for n, key in enumerate(keys):
        told = raw(served, ids_of(30 + n, 200), key)["kv_transfer_params"]["headrace"]
        assert told == {"key": key, "num_tokens": 200}
    with pytest.raises(DeliveryError, match="queue is full") as found:
        served.channel.take(keys[2], 20.0)
    assert found.value.transient
    for key in keys[:2]:
        assert served.channel.take(key, 20.0).num_tokens == 200
    assert len(states(served, ids_of(32, 200))) == 200


def test_an_aborted_request_delivers_nothing_and_the_engine_goes_on(
    served: Endpoint, target: TransformersTarget
) -> None:
    key = uuid.uuid4().hex
    with pytest.raises(urllib3.exceptions.TimeoutError):
        raw(served, ids_of(40, 1500), key, timeout=0.3, max_tokens=300)
    time.sleep(2.0)
    with pytest.raises(DeliveryError, match="nothing came"):
        served.channel.take(key, 0.5)
    check(served, target, ids_of(41, 60))


@pytest.mark.parametrize("own", [{"key": "no key"}, {"key": "0" * 32, "kind": "others"}, "text", {}])
def test_a_request_that_cannot_be_delivered_says_so_for_good(served: Endpoint, own: Any) -> None:
    told = raw(served, ids_of(50, 20), "", kv_transfer_params={"headrace": own})["kv_transfer_params"]["headrace"]
    assert told["transient"] is False
    assert "needed" in told["error"]
