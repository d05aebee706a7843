"""What keeps strangers out: a token, a key and a certificate, each in a file that only its owner reads.

In: paths. Out: their content, checked; or new files. A token is never part of a message, a log or an error.
"""

import datetime
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.errors import StreamError

CERTIFICATE, KEY, TOKEN = "cert.pem", "key.pem", "token"  # file names in the folder `serve` of a run
LEAST_TOKEN = 16  # characters
_MOST_BYTES = 1024 * 1024
_DAYS = 365


def read_token(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises: StreamError where it is absent, short, not printable, or others than its owner can read the file.
    """
    token = read_private(path, "a token").decode("ascii", errors="replace").strip()
    if len(token) < LEAST_TOKEN or len(token) > 1024 or not token.isascii() or not token.isprintable() or " " in token:
        hint = f"write one line of {LEAST_TOKEN} to 1024 printable characters; `headrace serve --make-cert` makes one"
        raise StreamError(f"a token in {path}", "another content", hint)
    return token


def read_private(path: Path, what: str) -> bytes:
    """A file that only its owner may read. Raises: StreamError."""
    content = read_file(path, what)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StreamError(f"{what} in {path} for its owner alone", "others may read it too", f"chmod 600 {path}")
    return content


def read_file(path: Path, what: str) -> bytes:
    """A small file. Raises: StreamError."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise StreamError(f"{what} in {path}", exc.strerror or "nothing", "see docs/streaming.md") from exc
    if not content or len(content) > _MOST_BYTES:
        raise StreamError(f"{what} in {path}", f"{len(content)} bytes", "see docs/streaming.md")
    return content


def same_token(given: str, own: str) -> bool:
    """Whether they are equal, in a time that does not tell how much of it is."""
    return hmac.compare_digest(given.encode(), own.encode())


def make_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write a key, a certificate signed by it, and a token; what is there stays.

    Args: names: host names and IP addresses by which readers will reach the server; loopback's are added.
    Returns: the files that were written. Raises: StreamError where one of key and certificate is there alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key, token = (folder / name for name in (CERTIFICATE, KEY, TOKEN))
    if certificate.exists() != key.exists():
        alone = certificate if certificate.exists() else key
        raise StreamError("key and certificate together", f"{alone} alone", f"remove {alone}, or bring the other back")
    written = []
    if not certificate.exists():
        private = ec.generate_private_key(ec.SECP256R1())
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write_new(key, pem, 0o600)
        _write_new(certificate, self_signed(private, names, _DAYS), 0o644)
        written += [key, certificate]
    if not token.exists():
        _write_new(token, secrets.token_urlsafe(32).encode() + b"\n", 0o600)
        written.append(token)
    return written


def self_signed(private: ec.EllipticCurvePrivateKey, names: Sequence[str], days: int) -> bytes:
    """A certificate for these names in PEM, valid from an hour ago for so many days (negative: it has expired)."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headrace")])
    every = dict.fromkeys([*names, "localhost", "127.0.0.1", "::1"])
    begins = now - datetime.timedelta(hours=1, days=max(0, -days) * 2)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general(entry) for entry in every]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that is never, not even for a moment, open to others."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
