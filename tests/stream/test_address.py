import pytest

from headrace.errors import ConfigError
from headrace.stream.address import Address, parse_address, parse_source


def test_servers_are_named_one_by_one() -> None:
    found = parse_source("grpc+tls://a.example:1, grpc://127.0.0.1:2,grpc+tls://[::1]:3")
    assert found == [Address("a.example", 1, True), Address("127.0.0.1", 2, False), Address("::1", 3, True)]
    assert [a.target for a in found] == ["a.example:1", "127.0.0.1:2", "[::1]:3"]
    assert str(found[2]) == "grpc+tls://[::1]:3"


@pytest.mark.parametrize(
    "text", ["", "a:1", "http://a:1", "grpc://a", "grpc://a:b", "grpc://a:70000", "grpc://::1:3", "grpc://:1", ","]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_source(text)


def test_a_server_stands_once() -> None:
    with pytest.raises(ConfigError, match="once"):
        parse_source("grpc://a:1,grpc://a:1")


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("0.0.0.0", False),
     ("[::]", False), ("10.0.0.1", False), ("a.example", False)],
)  # fmt: skip
def test_loopback_is_known(host: str, own: bool) -> None:
    assert parse_address(f"{host}:5", tls=False).is_loopback is own
