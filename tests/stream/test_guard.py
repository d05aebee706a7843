import logging
from typing import Any

import grpc
import pytest

from headrace.errors import CaptureError, StreamError
from headrace.stream.guard import Guard, OtherStates, Unavailable

TOKEN = "a-token-of-this-test"


class Aborted(Exception):
    pass


class FakeContext:
    def __init__(self, given: str | bytes | None) -> None:
        self.given = given
        self.code: grpc.StatusCode | None = None
        self.told = ""

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [] if self.given is None else [("authorization", self.given)]

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.told = code, details
        raise Aborted


def guarded(given: str | bytes | None, raised: BaseException | None = None) -> FakeContext:
    context: Any = FakeContext(given)
    with Guard(context, TOKEN):
        if raised is not None:
            raise raised
    return context


@pytest.mark.parametrize("given", [None, "", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer ü", b"Bearer \xff"])
def test_only_the_token_opens(given: str | bytes | None) -> None:
    context: Any = FakeContext(given)
    with pytest.raises(Aborted), Guard(context, TOKEN):
        raise AssertionError("the work began")
    assert context.code is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in context.told
    assert guarded(f"Bearer {TOKEN}").code is None


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (StreamError("a", "b", "c"), "INVALID_ARGUMENT"),
        (Unavailable("a", "b", "c"), "RESOURCE_EXHAUSTED"),
        (OtherStates("a", "b", "c"), "FAILED_PRECONDITION"),
        (CaptureError("states", f"none in /a/folder {TOKEN}", "look"), "DATA_LOSS"),
        (KeyError("/a/folder"), "INTERNAL"),
    ],
)
def test_errors_become_statuses_without_paths(raised: Exception, code: str, caplog: pytest.LogCaptureFixture) -> None:
    context: Any = FakeContext(f"Bearer {TOKEN}")
    with caplog.at_level(logging.ERROR), pytest.raises(Aborted), Guard(context, TOKEN):
        raise raised
    assert context.code.name == code
    assert "/a/folder" not in context.told
    assert TOKEN not in context.told
    if code in ("DATA_LOSS", "INTERNAL"):
        assert "/a/folder" in caplog.text
        assert caplog.records[0].getMessage().removeprefix("call failed ").strip("()") in context.told


def test_a_generator_that_is_closed_is_no_error() -> None:
    with pytest.raises(GeneratorExit):
        guarded(f"Bearer {TOKEN}", GeneratorExit())
