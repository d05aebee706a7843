"""What the vLLM connector does with the captured columns of a request: check, encode, hand over. Knows no vLLM.

In: the pages of an engine's cache that hold a request's states, on whatever device they are. Out: a delivery on the
channel, made piece by piece, so that what leaves the device is the codec's small form and no long request needs a copy
of its own; or the cause why there is none. In the plain file form: one safetensors file a request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from headrace.capture.check import check_states
from headrace.codec.base import TORCH_DTYPES, Codec
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import open_codec
from headrace.errors import CaptureError, HeadraceError
from headrace.files import write_atomic
from headrace.record import SEGMENT_BYTES, segment_spans
from headrace.taps import Tap, parse_tap
from headrace.target.channel import ChannelFull, ChannelServer, Delivery, Kind, ids_digest
from headrace.target.engine_file import EngineFile

Ids = npt.NDArray[np.int32]
Parts = tuple[list[tuple[int, int]], list[bytes | memoryview], str]

PIECE_BYTES = 8 * SEGMENT_BYTES  # raw states that are on their way at a time
SPARE = 1.25  # sizes of lossless, and of escapes, are what is expected; a part of the channel has a hard bound
FAILED = ".failed"  # beside the file that could not be written


@dataclass(frozen=True)
class Wanted:
    """What is to be delivered: of which tokens, under which key, in which form."""

    key: str
    kind: Kind
    input_ids: Ids


class NoCodec(CaptureError):
    """A payload was asked of an engine that has no codec; asking again does not help."""


class PagedStates:
    """Rows of one request in an engine's paged cache [blocks, columns, tokens of a block, hidden]."""

    def __init__(self, cache_BLSH: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Args: block_ids: the request's blocks, in the order of its tokens."""
        self._cache, self._blocks = cache_BLSH, list(block_ids)

    @property
    def num_rows(self) -> int:
        """Tokens that the blocks have room for."""
        return len(self._blocks) * self._cache.shape[2]

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A copy [end - start, columns, hidden] on the cache's device. Raises: CaptureError beyond the last block."""
        if end > self.num_rows:
            raise CaptureError(f"rows of {end} tokens", f"{self.num_rows} in the engine's blocks", "retry the request")
        size = self._cache.shape[2]
        first = start // size
        chosen = torch.tensor(self._blocks[first : -(-end // size)], device=self._cache.device)
        states_TLH = self._cache[chosen].transpose(1, 2).flatten(0, 1)
        return states_TLH[start - first * size : end - first * size]


class HostCopy:
    """Bytes of a tensor on the host: the tensor's own on a CPU, through one pinned buffer from CUDA."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> bytes | memoryview:
        """Copy a tensor of at most SEGMENT_BYTES, little-endian, and wait for the copy."""
        flat = tensor.contiguous().flatten().view(torch.uint8)
        if not flat.is_cuda:
            return memoryview(flat.numpy().data)
        if self._pinned is None:
            self._pinned = torch.empty(SEGMENT_BYTES, dtype=torch.uint8, pin_memory=True)
        self._pinned[: len(flat)].copy_(flat, non_blocking=True)
        torch.cuda.current_stream(flat.device).synchronize()
        return self._pinned[: len(flat)].numpy().tobytes()


class Deliverer:
    """One engine process's way from captured columns to its channel, or to files."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Listen on the channel that `engine.json` at `path` names.

        Args: device: where the states are, and where they are encoded.
        Raises: ConfigError, CodecError for a description or a codec that cannot be used; TargetError for a channel
        that cannot be had.
        """
        self._path, self._device = path, device
        self.engine = EngineFile.read(path)
        self._codec = self._open()
        self._copy = HostCopy()
        self.server: ChannelServer | None = None
        if self.engine.files is not None:
            Path(self.engine.files).mkdir(parents=True, exist_ok=True)
        else:
            self.server = ChannelServer(Path(self.engine.channel), self.engine.told(), self.engine.queue_bytes)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self.server is not None:
            self.server.close()

    def deliver(self, wanted: Wanted, paged: PagedStates) -> None:
        """Put a request's states on the channel, or the cause why they are not there."""
        assert self.server is not None
        try:
            self.server.put(wanted.key, self._delivery(wanted, paged))
        except ChannelFull as exc:
            self.server.fail(wanted.key, f"the engine's queue is full: {exc.args[1]}", transient=True)
        except HeadraceError as exc:
            self.server.fail(
                wanted.key, f"{exc.args[1]} (expected {exc.args[0]})", transient=not isinstance(exc, NoCodec)
            )
        except (RuntimeError, OSError, MemoryError) as exc:  # out of device or host memory; a later try may pass
            self.server.fail(wanted.key, f"{type(exc).__name__}: {exc}", transient=True)

    def write(self, target: Path, input_ids: Ids, paged: PagedStates) -> None:
        """Write `hidden_states` [T, columns, H] and `token_ids` int64 [T] to a file that appears whole, or the cause
        to a file beside it."""
        temporary = target.with_suffix(".tmp")
        try:
            states = paged.rows(0, len(input_ids)).cpu().contiguous()
            save_file({"hidden_states": states, "token_ids": torch.from_numpy(input_ids.astype(np.int64))}, temporary)
            temporary.replace(target)
        except (HeadraceError, RuntimeError, OSError, MemoryError) as exc:
            with suppress(OSError):  # a disk that takes nothing at all; the reader waits in vain, the engine goes on
                temporary.unlink(missing_ok=True)
                write_atomic(target.with_name(target.name + FAILED), f"{exc}\n")

    @staticmethod
    def new_file(folder: Path) -> Path:
        """A name that no request has had; never one that a client chose."""
        return folder / f"{uuid4().hex}.safetensors"

    def _open(self) -> Codec | None:
        spec = self.engine.spec
        if spec is None:
            return None
        codec = open_codec(spec, None if self.engine.basis is None else Path(self.engine.basis))
        if isinstance(codec, QuantisedCodec) and codec.basis is not None:
            return QuantisedCodec(spec, codec.basis.to(self._device))
        return codec

    def _need_codec(self) -> Codec:
        if self._codec is None:  # fitted after the engine was started
            self.engine = EngineFile.read(self._path)
            self._codec = self._open()
        if self._codec is None:
            raise NoCodec("a codec in engine.json", "none", "fit one, then run headrace engine again")
        return self._codec

    def _delivery(self, wanted: Wanted, paged: PagedStates) -> Delivery:
        make = self._payload if wanted.kind == "payload" else self._states
        spans, parts, dtype = make(wanted.input_ids, paged)
        return Delivery(wanted.kind, ids_digest(wanted.input_ids), len(wanted.input_ids), spans, parts, dtype)

    def _payload(self, input_ids: Ids, paged: PagedStates) -> Parts:
        codec, columns = self._need_codec(), self.engine.encoded
        spec, taps = codec.spec, [parse_tap(self.engine.taps[column]) for column in columns]
        in_order = columns == list(range(self.engine.num_states))
        # Also within PIECE_BYTES raw, in float32 at worst: a codec's ratio does not stretch what is held at a time.
        raw = self.engine.num_states * self.engine.hidden_size * 4
        expected = spec.bytes_per_token() * (1.0 if spec.name == "raw" else SPARE)
        spans = segment_spans(len(input_ids), max(expected, raw * SEGMENT_BYTES / PIECE_BYTES))
        parts: list[bytes | memoryview] = []
        for start, end in spans:
            rows = paged.rows(start, end)
            states = (rows if in_order else rows[:, columns]).to(TORCH_DTYPES[spec.dtype])
            self._check(states, input_ids, start, taps)
            parts.append(self._copy(states) if spec.name == "raw" else codec.encode(states))
        return spans, parts, spec.dtype

    def _states(self, input_ids: Ids, paged: PagedStates) -> Parts:
        taps = [parse_tap(name) for name in self.engine.taps]
        one = paged.rows(0, 1)
        spans = segment_spans(len(input_ids), one.numel() * one.element_size())
        parts: list[bytes | memoryview] = []
        for start, end in spans:
            rows = paged.rows(start, end)
            self._check(rows, input_ids, start, taps)
            parts.append(self._copy(rows))
        return spans, parts, str(one.dtype).removeprefix("torch.")

    def _check(self, states_TLH: torch.Tensor, input_ids: Ids, start: int, taps: Sequence[Tap]) -> None:
        own = input_ids[start : start + len(states_TLH)]
        if (wrong := check_states(states_TLH, own, taps, self.engine.hidden_size)) is not None:
            where = f"{wrong}, counted from token {start}" if start else wrong
            raise CaptureError("states that hold", where, "retry the request; if it stays, see headrace probe")


class Lane:
    """Where deliveries run, and which of them have ended.

    Without a GPU in the engine's own thread: a second one would fight for the cores of the forward pass, and for
    Python. With one in a thread and on a stream of its own, so that the next forward pass is not held up; the engine
    keeps the request's blocks until its delivery has ended.
    """

    def __init__(self, device: torch.device, threaded: bool | None = None) -> None:
        """Args: threaded: for tests; none means where the device is CUDA."""
        own_thread = device.type == "cuda" if threaded is None else threaded
        self._pool = ThreadPoolExecutor(1, "headrace-deliver") if own_thread else None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: dict[str, Future[None]] = {}
        self._ended: set[str] = set()

    def submit(self, request_id: str, work: Callable[[], None]) -> None:
        """Run work that reads what the current stream has written so far."""
        if self._pool is None:
            work()
            self._ended.add(request_id)
            return
        written = None
        if self._stream is not None:
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
        self._running[request_id] = self._pool.submit(self._on_stream, work, written)

    def ended(self) -> set[str]:
        """Requests whose work has ended since the last call; what a fault of ours raised is raised here."""
        done = {request_id for request_id, running in self._running.items() if running.done()}
        for request_id in done:
            self._running.pop(request_id).result()
        ended, self._ended = self._ended | done, set()
        return ended

    def close(self) -> None:
        """Wait for what runs."""
        if self._pool is not None:
            self._pool.shutdown()

    def _on_stream(self, work: Callable[[], None], written: torch.cuda.Event | None) -> None:
        if self._stream is None or written is None:
            work()
            return
        self._stream.wait_event(written)
        with torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()  # the engine may hand the blocks to another request after this
