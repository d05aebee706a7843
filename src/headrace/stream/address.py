"""Where a server listens and where readers find it.

In: `host:port`, or `grpc+tls://host:port` (several, separated by commas). Out: addresses, and whether one lies on this
machine alone.
"""

import ipaddress
from dataclasses import dataclass

from headrace.errors import ConfigError

PLAIN, TLS = "grpc", "grpc+tls"
_HINT = "write grpc+tls://host:port; several servers are separated by commas"


@dataclass(frozen=True)
class Address:
    """A host and a port; `tls` says how it is spoken to."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"{TLS if self.tls else PLAIN}://{self.target}"

    @property
    def target(self) -> str:
        """Host and port as gRPC takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; names other than localhost count as foreign."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str, tls: bool) -> Address:
    """`host:port`; an IPv6 address stands in brackets. Raises: ConfigError."""
    host, _, port = text.strip().rpartition(":")
    inner = host.removeprefix("[").removesuffix("]")
    if not inner or not port.isdecimal() or int(port) > 65535 or (":" in inner) != host.startswith("["):
        raise ConfigError("host:port", repr(text), _HINT)
    return Address(inner, int(port), tls)


def parse_source(text: str) -> list[Address]:
    """The servers that a run file's `source` names. Raises: ConfigError for anything else than addresses."""
    found = []
    for part in text.split(","):
        scheme, mark, rest = part.strip().partition("://")
        if not mark or scheme not in (PLAIN, TLS):
            raise ConfigError("source: grpc+tls://host:port", repr(part), _HINT)
        found.append(parse_address(rest, scheme == TLS))
    if len(set(found)) != len(found):
        raise ConfigError("each server once in source", repr(text), _HINT)
    return found
