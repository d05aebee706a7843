"""A link that can be made bad: a relay between a reader and a server, with faults on request.

In: connections, and what should happen to them. Out: the same bytes later, cut off, held up, or with one bit turned,
inside a frame's payload or inside its header (HTTP/2 without TLS is read along, to know which is which).
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Place = Literal["payload", "framing"]
_CHUNK = 64 * 1024
_MOST_LATE = 1024  # chunks on their way
_HEADER = 9  # bytes of a frame's header
_DATA = 0  # type of a frame
_LARGE = 256  # bytes of a payload worth damaging


class Relay:
    """Listens at `port` of `host` and carries everything to `target`, in both directions, `delay_s` later."""

    def __init__(self, target: int, delay_s: float = 0.0, host: str = "127.0.0.1") -> None:
        self.target, self.delay_s = target, delay_s
        self.num_damaged = self.num_connections = 0
        self._damage: Place | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = self._do(asyncio.start_server(self._carry, host, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """End every connection that is open now, without a goodbye."""
        self._do(self._cut())

    def stall(self, seconds: float) -> None:
        """Carry nothing for so long; returns at once."""
        self._do(self._stall(seconds))

    def damage(self, place: Place) -> None:
        """Turn one bit of the next large frame from the server: in its payload, or in the length of its header."""
        self._damage = place

    def close(self) -> None:
        """Stop; safe to call twice."""
        if self._loop.is_closed():
            return
        self._do(self._end())
        self._do(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _end(self) -> None:
        """Listen no more, and cut: in the loop's own thread, where connections that end look at the same waiters."""
        self._server.close()
        await self._cut()

    async def _stall(self, seconds: float) -> None:
        self._flowing.clear()
        self._loop.call_later(seconds, self._flowing.set)

    async def _settle(self) -> None:
        """End what still carries."""
        own = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        try:
            pumps = (self._pump(reader, back, None), self._pump(there, writer, _Frames()))
            ways = [self._loop.create_task(pump) for pump in pumps]
            _, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        finally:
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: "_Frames | None") -> None:
        late: asyncio.Queue[tuple[float, bytearray]] = asyncio.Queue(_MOST_LATE)
        writing = self._loop.create_task(self._write(late, writer))
        try:
            with suppress(ConnectionError):
                while chunk := bytearray(await reader.read(_CHUNK)):
                    if frames is not None:
                        self._spoil(chunk, frames)
                    await late.put((self._loop.time() + self.delay_s, chunk))
                await late.join()
        finally:
            writing.cancel()

    async def _write(self, late: "asyncio.Queue[tuple[float, bytearray]]", writer: asyncio.StreamWriter) -> None:
        """What is on its way: each chunk as late as it is to be, however many follow it."""
        with suppress(ConnectionError):
            while True:
                due, chunk = await late.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flowing.wait()
                writer.write(chunk)
                await writer.drain()
                late.task_done()
        writer.transport.abort()

    def _spoil(self, chunk: bytearray, frames: "_Frames") -> None:
        for header, payload, end in frames.within(chunk):
            if self._damage is None:
                continue
            if self._damage == "payload":
                chunk[(payload + end) // 2] ^= 0x10
            else:
                chunk[header] ^= 0x04  # the first byte of the length
            self._damage = None
            self.num_damaged += 1


class _Frames:
    """Follows the frames of one direction of HTTP/2 from its first byte."""

    def __init__(self) -> None:
        self._next = 0  # bytes until the next frame begins
        self._head = b""  # of a header that the last chunk's end has cut in two

    def within(self, chunk: bytearray) -> list[tuple[int, int, int]]:
        """Large data frames that begin in a chunk: where header and payload begin, and where the payload ends in it."""
        found = []
        if self._head:
            missing = _HEADER - len(self._head)
            self._head += bytes(chunk[:missing])
            if len(self._head) < _HEADER:
                return []
            self._next = missing + int.from_bytes(self._head[:3], "big")
            self._head = b""
        while self._next <= len(chunk) - _HEADER:
            at = self._next
            length = int.from_bytes(chunk[at : at + 3], "big")
            end = min(len(chunk), at + _HEADER + length)
            if length >= _LARGE and chunk[at + 3] == _DATA and end > at + _HEADER:
                found.append((at, at + _HEADER, end))
            self._next = at + _HEADER + length
        if self._next < len(chunk):
            self._head = bytes(chunk[self._next :])
        self._next -= len(chunk)
        return found
