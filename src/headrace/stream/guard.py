"""What a stranger's call meets first, and what any caller is told when a call fails.

In: a call and what it raised. Out: a status without traces, paths or secrets; the log has the rest under a number that
the status names. Who shows no token, or another, learns nothing else.
"""

import itertools
import logging
from types import TracebackType

import grpc

from headrace.errors import HeadraceError, StreamError
from headrace.stream.secrets import same_token

log = logging.getLogger(__name__)
_numbers = itertools.count(1)
_SCHEME = "Bearer "


class Unavailable(StreamError):
    """Not now; the caller may come again."""


class OtherStates(StreamError):
    """The caller began with states of another identity."""


class Guard:
    """Around the work of one call: checks the token on entry, turns what is raised into a status."""

    def __init__(self, context: grpc.ServicerContext, token: str) -> None:
        self._context, self._token = context, token

    def __enter__(self) -> None:
        given = dict(self._context.invocation_metadata()).get("authorization", "")
        text = given if isinstance(given, str) else given.decode("ascii", errors="replace")
        if not same_token(text, _SCHEME + self._token):
            self._context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is needed: authorization: Bearer TOKEN")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None or not isinstance(exc, Exception):  # a generator that is closed, an interrupt
            return
        code, told = _status(exc)
        self._context.abort(code, told)


def _status(exc: Exception) -> tuple[grpc.StatusCode, str]:
    if isinstance(exc, Unavailable):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"expected {exc.args[0]}, found {exc.args[1]}"
    if isinstance(exc, OtherStates):
        return grpc.StatusCode.FAILED_PRECONDITION, f"expected {exc.args[0]}, found {exc.args[1]}"
    if isinstance(exc, StreamError):  # raised about the request; its words are about nothing else
        return grpc.StatusCode.INVALID_ARGUMENT, f"expected {exc.args[0]}, found {exc.args[1]}"
    number = next(_numbers)
    log.error("call failed (entry %d)", number, exc_info=exc)
    if isinstance(exc, HeadraceError):
        return grpc.StatusCode.DATA_LOSS, f"the server cannot give these states; its log says why (entry {number})"
    return grpc.StatusCode.INTERNAL, f"an error of the server; its log says more (entry {number})"
