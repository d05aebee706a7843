import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.codec.basis import Basis
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import open_codec, save_codec
from headrace.codec.spec import short_spec
from headrace.plugins import vllm_delivery
from headrace.plugins.vllm_delivery import FAILED, Deliverer, HostCopy, Lane, PagedStates, Wanted
from headrace.target.channel import ChannelClient, Delivery, DeliveryError, DeliveryRefused, ids_digest
from tests.target.test_engine_file import engine_file

KEY = "0" * 32
BLOCK, COLUMNS, HIDDEN = 4, 3, 8
BLOCKS = [5, 2, 7, 1]  # not in the cache's order


def ids_of(size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(100, 100 + size, dtype=np.int32)


def states_of(size: int) -> torch.Tensor:
    return torch.randn(size, COLUMNS, HIDDEN, generator=torch.Generator().manual_seed(size))


def paged(states_TLH: torch.Tensor) -> PagedStates:
    """The states in a cache whose other blocks hold nonsense."""
    cache = torch.full((9, COLUMNS, BLOCK, HIDDEN), 777.0, dtype=states_TLH.dtype)
    for token, row in enumerate(states_TLH):
        cache[BLOCKS[token // BLOCK], :, token % BLOCK] = row
    return PagedStates(cache, BLOCKS[: -(-len(states_TLH) // BLOCK)])


class Side:
    """A deliverer with the client of its channel."""

    def __init__(self, folder: Path, **changed: Any) -> None:
        engine = engine_file(channel=str(folder / "s"), **changed)
        self.path = engine.write(folder)
        self.deliverer = Deliverer(self.path, torch.device("cpu"))
        self.client = ChannelClient(folder / "s", 10.0)

    def give(self, states_TLH: torch.Tensor, kind: Any = "payload", key: str = KEY) -> Delivery:
        self.deliverer.deliver(Wanted(key, kind, ids_of(len(states_TLH))), paged(states_TLH))
        return self.client.take(key, 0.0)


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    one = Side(tmp_path)
    yield one
    one.deliverer.close()


@pytest.mark.parametrize("span", [(0, 1), (0, 4), (3, 5), (4, 8), (0, 14), (13, 14)])
def test_rows_come_out_of_their_blocks_in_order(span: tuple[int, int]) -> None:
    states = states_of(14)
    assert torch.equal(paged(states).rows(*span), states[slice(*span)])


def test_a_request_delivers_its_taps_in_the_runs_order(side: Side) -> None:
    states = states_of(14)
    found = side.give(states)
    wanted = states[:, [1, 0]]
    assert b"".join(found.parts) == wanted.numpy().tobytes()
    assert (found.kind, found.num_tokens, found.dtype) == ("payload", 14, "float32")
    assert found.input_ids_digest == ids_digest(ids_of(14))


def test_states_are_rounded_to_the_codecs_dtype(tmp_path: Path) -> None:
    side = Side(tmp_path, codec=short_spec("raw", 2, HIDDEN, "bfloat16").to_json())
    wanted = states_of(5)[:, [1, 0]].bfloat16()
    assert b"".join(side.give(states_of(5)).parts) == wanted.view(torch.uint8).numpy().tobytes()
    side.deliverer.close()


def test_a_codec_encodes_as_it_does_elsewhere(tmp_path: Path) -> None:
    spec = short_spec("rotated:4", 2, HIDDEN, "float32")
    side = Side(tmp_path, codec=spec.to_json())
    assert side.give(states_of(9)).parts == [open_codec(spec).encode(states_of(9)[:, [1, 0]])]
    side.deliverer.close()


def test_a_fitted_codec_is_opened_with_its_basis(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    basis = Basis(torch.ones(2), torch.zeros(6), torch.linalg.qr(torch.randn(16, 6, generator=generator))[0].T)
    spec = save_codec(short_spec("latent:6x8", 2, HIDDEN, "float32"), basis, tmp_path / "codec")
    side = Side(tmp_path, codec=spec.to_json(), basis=str(tmp_path / "codec"))
    assert side.give(states_of(9)).parts == [QuantisedCodec(spec, basis).encode(states_of(9)[:, [1, 0]])]
    side.deliverer.close()


def test_raw_columns_are_all_of_them_in_the_engines_dtype(side: Side) -> None:
    states = states_of(6).half()
    found = side.give(states, "states")
    assert found.dtype == "float16"
    assert b"".join(found.parts) == states.numpy().tobytes()


def test_a_long_request_goes_in_pieces_bounded_in_raw_bytes(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_delivery, "PIECE_BYTES", 5.5 * COLUMNS * HIDDEN * 4)
    taken: list[tuple[int, int]] = []
    whole = PagedStates.rows

    def rows(self: PagedStates, start: int, end: int) -> torch.Tensor:
        taken.append((start, end))
        return whole(self, start, end)

    monkeypatch.setattr(PagedStates, "rows", rows)
    states = states_of(14)
    found = side.give(states)
    assert found.spans == [(0, 5), (5, 10), (10, 14)] == taken
    assert b"".join(found.parts) == states[:, [1, 0]].numpy().tobytes()


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda s: s[6].fill_(0.0), "all zero at token 6"),
        (lambda s: s[3, 1].fill_(float("nan")), "not finite at token 3"),
        (lambda s: s[9].copy_(s[2]), "tokens 2 and 9 differ but have the same states"),
    ],
)
def test_states_that_cannot_be_right_are_told_and_not_delivered(side: Side, spoil: Any, cause: str) -> None:
    for kind in ("payload", "states"):
        states = states_of(14)
        spoil(states)
        with pytest.raises(DeliveryError, match=cause) as found:
            side.give(states, kind)
        assert found.value.transient


def test_too_few_blocks_are_told(side: Side) -> None:
    short = paged(states_of(8))
    side.deliverer.deliver(Wanted(KEY, "payload", ids_of(9)), short)
    with pytest.raises(DeliveryError, match="8 in the engine's blocks"):
        side.client.take(KEY, 0.0)


def test_a_full_queue_is_told_and_empties_when_it_is_taken(tmp_path: Path) -> None:
    side = Side(tmp_path, queue_bytes=1000)  # 14 tokens are 896 bytes
    wanted = Wanted("1" * 32, "payload", ids_of(14))
    side.deliverer.deliver(wanted, paged(states_of(14)))
    with pytest.raises(DeliveryError, match="queue is full") as found:
        side.give(states_of(14))
    assert found.value.transient
    assert side.client.take("1" * 32, 0.0).num_tokens == 14
    assert side.give(states_of(14)).num_tokens == 14
    side.deliverer.close()


def test_memory_that_runs_out_is_told(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PagedStates, start: int, end: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PagedStates, "rows", full)
    with pytest.raises(DeliveryError, match="CUDA out of memory"):
        side.give(states_of(3))


def test_an_engine_without_codec_gives_columns_and_reads_one_that_came_later(tmp_path: Path) -> None:
    side = Side(tmp_path, codec=None)
    assert side.give(states_of(3), "states").num_tokens == 3
    with pytest.raises(DeliveryRefused, match="a codec"):
        side.give(states_of(3))
    engine_file(channel=str(tmp_path / "s")).write(tmp_path)
    assert side.give(states_of(3)).kind == "payload"
    side.deliverer.close()


def test_the_channel_is_private_tells_what_it_serves_and_goes_away(side: Side) -> None:
    assert stat.S_IMODE((side.path.parent / "s").stat().st_mode) == 0o600
    assert side.client.hello()["taps"] == list(side.deliverer.engine.taps)
    side.deliverer.close()
    assert [path.name for path in side.path.parent.iterdir()] == ["engine.json"]


def test_the_plain_file_form_appears_whole_or_says_why_not(tmp_path: Path) -> None:
    engine_file(files=str(tmp_path / "files")).write(tmp_path)
    deliverer = Deliverer(tmp_path, torch.device("cpu"))
    assert deliverer.server is None
    states = states_of(7)
    file = deliverer.new_file(tmp_path / "files")
    deliverer.write(file, ids_of(7), paged(states))
    found = load_file(file)
    assert torch.equal(found["hidden_states"], states)
    assert found["token_ids"].tolist() == ids_of(7).tolist()
    other = deliverer.new_file(tmp_path / "files")
    deliverer.write(other, ids_of(9), paged(states))
    assert "8 in the engine's blocks" in other.with_name(other.name + FAILED).read_text()
    assert sorted(path.suffix for path in (tmp_path / "files").iterdir()) == [FAILED, ".safetensors"]


def test_a_host_copy_of_a_cpu_tensor_is_its_own_bytes() -> None:
    states = states_of(4).bfloat16()
    assert HostCopy()(states) == states.view(torch.uint8).numpy().tobytes()


def test_without_a_gpu_work_runs_at_once_in_the_engines_thread() -> None:
    lane, ran = Lane(torch.device("cpu")), []
    lane.submit("a", lambda: ran.append(threading.current_thread()))
    assert ran == [threading.main_thread()]
    assert lane.ended() == {"a"}
    assert lane.ended() == set()


def test_in_a_thread_a_request_ends_when_its_work_has_ended() -> None:
    lane, go = Lane(torch.device("cpu"), threaded=True), threading.Event()
    held: list[bool] = []
    lane.submit("a", lambda: held.append(go.wait(30)))
    lane.submit("b", lambda: None)
    assert lane.ended() == set()
    go.set()
    lane.close()
    assert lane.ended() == {"a", "b"}


def test_a_fault_of_ours_in_the_thread_is_not_swallowed() -> None:
    lane = Lane(torch.device("cpu"), threaded=True)
    lane.submit("a", lambda: {}["nothing"])
    lane.close()
    with pytest.raises(KeyError, match="nothing"):
        lane.ended()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch sees")
def test_on_cuda_pieces_come_through_pinned_memory_on_a_stream_of_their_own(tmp_path: Path) -> None:
    side, device, states = Side(tmp_path), torch.device("cuda"), states_of(14)
    cache = paged(states)._cache.to(device)
    lane = Lane(device)
    owed = Wanted(KEY, "payload", ids_of(14))
    lane.submit("a", lambda: side.deliverer.deliver(owed, PagedStates(cache, BLOCKS)))
    lane.close()
    assert lane.ended() == {"a"}
    assert b"".join(side.client.take(KEY, 0.0).parts) == states[:, [1, 0]].numpy().tobytes()
    side.deliverer.close()
