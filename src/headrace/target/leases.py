"""Many servers at one list of requests.

In: endpoints and numbered requests. Out: the outcome of each request once, in the order they end. Each server works on
at most `in_flight` leases; a lease that fails for a passing cause goes back and is given out again, to whichever server
is free, after a while; a server that keeps failing is set aside and asked again later; when none is left the run ends.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.errors import ConfigError, HeadraceError, TargetError
from headrace.kinds import EngineConfig
from headrace.target.channel import DeliveryError, EngineGone
from headrace.target.endpoints import Answer, Endpoint, Request

log = logging.getLogger(__name__)
T = TypeVar("T")

_BACKOFF_S, _MOST_BACKOFF_S = 0.5, 30.0
_FAILURES_IN_A_ROW = 3  # and as many as were in flight together


@dataclass
class Figures:
    """What one server did in this run."""

    num_requests: int = 0
    num_tokens: int = 0
    in_flight: int = 0
    num_retries: int = 0
    num_failures: int = 0
    num_set_aside: int = 0
    seconds: float = 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens of finished requests a second, since the run began."""
        return self.num_tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How the request of a number ended: with what was made of its answer, or with an error."""

    number: int
    made: T | None
    error: DeliveryError | None = None


@dataclass
class _Server:
    endpoint: Endpoint
    figures: Figures = field(default_factory=Figures)
    aside_until: float | None = None  # to be asked for its health then, before anything else
    down: bool = False
    asking: bool = False
    in_a_row: int = 0
    last_error: str = ""


@dataclass
class _Lease:
    number: int
    request: Request
    num_tries: int = 0
    not_before: float = 0.0


class Leases(Generic[T]):
    """One list of requests given out to servers; `figures` by name are up to date while it runs."""

    def __init__(self, endpoints: Sequence[Endpoint], cfg: EngineConfig, make: Callable[[int, Answer], T]) -> None:
        """Ask every server for its health.

        Args:
            make: called in a server's thread with an answer; it may raise DeliveryError, and the answer counts as
                failed.
        Raises: TargetError when none of the servers is there.
        """
        self._cfg, self._make = cfg, make
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._changed = threading.Condition()
        self._returned: list[_Lease] = []
        self._source: Iterator[tuple[int, Request]] = iter(())
        self._drawn: _Lease | None = None
        self._num_leased = 0
        self._stopped = False
        self._began = time.monotonic()
        self._ended: queue.Queue[Outcome[T] | HeadraceError | None] = queue.Queue(len(endpoints) * cfg.in_flight + 1)
        for server in self._servers:
            self._ask_health(server)
        self._end_if_all_down()
        if self._stopped:
            raise self._all_gone()

    @property
    def figures(self) -> dict[str, Figures]:
        """Of each server."""
        for server in self._servers:
            server.figures.seconds = time.monotonic() - self._began
        return {server.endpoint.name: server.figures for server in self._servers}

    def run(self, requests: Iterable[tuple[int, Request]]) -> Iterator[Outcome[T]]:
        """Outcomes of numbered requests, in the order they end; requests are drawn as servers become free.

        Raises: TargetError, with the last lines of their logs, when no server is left.
        """
        self._source = iter(requests)
        self._began = time.monotonic()
        threads = [
            threading.Thread(target=self._work, args=(server,), name=f"headrace-{server.endpoint.name}", daemon=True)
            for server in self._servers
            for _ in range(self._cfg.in_flight)
        ]
        for thread in threads:
            thread.start()
        num_left = len(threads)
        try:
            while num_left:
                ended = self._ended.get()
                if ended is None:
                    num_left -= 1
                elif isinstance(ended, HeadraceError):
                    raise ended
                else:
                    yield ended
            if self._num_leased:
                found = f"{self._num_leased} that a thread broke off"
                raise TargetError("every request to end", found, "its error stands above; run again, it goes on")
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        with contextlib.suppress(queue.Empty):  # a thread that waits to hand over goes on, and ends
            while True:
                self._ended.get_nowait()

    def _work(self, server: _Server) -> None:
        """One thread; an error of ours, in `make` say, is raised by `run`, and nothing makes it wait for ever."""
        try:
            self._lend(server)
        except HeadraceError as exc:
            self._hand_over(exc)
        finally:
            self._hand_over(None)

    def _lend(self, server: _Server) -> None:
        while (lease := self._next(server)) is not None:
            try:
                outcome = self._try(server, lease)
            finally:
                with self._changed:
                    server.figures.in_flight -= 1
            if outcome is not None:
                self._hand_over(outcome)
                with self._changed:
                    self._num_leased -= 1
                    self._changed.notify_all()

    def _hand_over(self, what: Outcome[T] | HeadraceError | None) -> None:
        while not self._stopped:
            with contextlib.suppress(queue.Full):
                self._ended.put(what, timeout=1.0)
                return

    def _try(self, server: _Server, lease: _Lease) -> Outcome[T] | None:
        """The outcome of a lease; None when it went back to be given out again."""
        try:
            made = self._make(lease.number, server.endpoint.ask(lease.request))
        except DeliveryError as exc:
            return self._failed(server, lease, exc)
        with self._changed:
            server.in_a_row = 0
            server.figures.num_requests += 1
            server.figures.num_tokens += len(lease.request.prompt)
        return Outcome(lease.number, made)

    def _failed(self, server: _Server, lease: _Lease, error: DeliveryError) -> Outcome[T] | None:
        with self._changed:
            server.last_error = str(error.args[1])
            lease.num_tries += 1
            gone = isinstance(error, EngineGone)
            if error.transient:
                server.in_a_row += 1
                if gone:
                    server.aside_until = time.monotonic()  # in doubt: its health is asked at once
                elif server.in_a_row >= max(_FAILURES_IN_A_ROW, self._cfg.in_flight):
                    self._set_aside(server)
            if error.transient and lease.num_tries <= self._cfg.retries:
                server.figures.num_retries += 1
                wait = 0.0 if gone else min(_MOST_BACKOFF_S, _BACKOFF_S * 2 ** (lease.num_tries - 1))
                lease.not_before = time.monotonic() + wait
                self._returned.append(lease)
                self._num_leased -= 1
                self._changed.notify_all()
                outcome = None
            else:
                server.figures.num_failures += 1
                outcome = Outcome[T](lease.number, None, error)
        self._end_if_all_down()
        return outcome

    def _set_aside(self, server: _Server) -> None:
        server.figures.num_set_aside += not server.down
        server.down, server.in_a_row = True, 0
        server.aside_until = time.monotonic() + self._cfg.set_aside_s

    def _next(self, server: _Server) -> _Lease | None:
        """The next lease for a server, waited for; None when there will be none."""
        while True:
            with self._changed:
                if self._stopped:
                    return None
                ask = server.aside_until is not None and not server.asking and time.monotonic() >= server.aside_until
                if ask:
                    server.asking = True
                elif server.aside_until is None and (lease := self._lease(server)) is not None:
                    return lease
                elif not self._num_leased and not self._returned and not self._more():
                    self._changed.notify_all()
                    return None
                else:
                    self._changed.wait(self._pause(server))
            if ask:
                self._ask_health(server)
                self._end_if_all_down()

    def _more(self) -> bool:
        """Whether the list goes on."""
        if self._drawn is None and (first := next(self._source, None)) is not None:
            self._drawn = _Lease(*first)
        return self._drawn is not None

    def _lease(self, server: _Server) -> _Lease | None:
        now = time.monotonic()
        ready = next((lease for lease in self._returned if lease.not_before <= now), None)
        if ready is not None:
            self._returned.remove(ready)
        elif self._more():
            ready, self._drawn = self._drawn, None
        if ready is not None:
            self._num_leased += 1
            server.figures.in_flight += 1
        return ready

    def _pause(self, server: _Server) -> float:
        now = time.monotonic()
        times = [lease.not_before for lease in self._returned]
        if server.aside_until is not None and not server.asking:
            times = [server.aside_until]
        return min([1.0, *(max(0.01, at - now) for at in times)])

    def _ask_health(self, server: _Server) -> None:
        """Take a server back when it answers, set it aside (again) when it does not."""
        trouble = ""
        try:
            server.endpoint.reopen()
        except (DeliveryError, ConfigError) as exc:
            trouble = str(exc.args[1])
        with self._changed:
            server.asking = False
            if trouble:
                log.warning("engine %s set aside for %g s: %s", server.endpoint.name, self._cfg.set_aside_s, trouble)
                server.last_error = trouble
                self._set_aside(server)
            else:
                server.down, server.aside_until = False, None
            self._changed.notify_all()

    def _end_if_all_down(self) -> None:
        """When every server is down, ask each once more, and end the run if none answers."""
        with self._changed:
            if self._stopped or not all(server.down for server in self._servers):
                return
        for server in self._servers:
            self._ask_health(server)
        with self._changed:
            if not all(server.down for server in self._servers):
                return
        self._hand_over(self._all_gone())
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _all_gone(self) -> TargetError:
        told = []
        for server in self._servers:
            lines = server.endpoint.last_lines()
            told.append(f"{server.endpoint.name}: {server.last_error}" + (f"\n{lines}" if lines else ""))
        hint = "start them again (headrace engine --launch), then this command: it goes on from what is stored"
        return TargetError("an engine that answers", "none:\n" + "\n".join(told), hint)
