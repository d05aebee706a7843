import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.errors import StreamError
from headrace.stream.address import parse_source
from headrace.stream.client import StreamSource
from headrace.stream.link import Credentials, Link
from headrace.stream.secrets import CERTIFICATE, KEY, TOKEN, make_files, self_signed
from tests.stream.serving import make_store, positions, reader, reader_config, served


def pair(folder: Path, days: int = 365) -> Path:
    """A key and its certificate, as make_files writes them, valid for so many days."""
    private = ec.generate_private_key(ec.SECP256R1())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CERTIFICATE).write_bytes(self_signed(private, [], days))
    (folder / KEY).write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    (folder / KEY).chmod(0o600)
    return folder


def test_a_token_is_not_sent_over_a_network_that_others_can_read(tmp_path: Path) -> None:
    make_files(tmp_path, [])
    with pytest.raises(StreamError, match="TLS"):
        StreamSource("grpc://10.0.0.1:5", reader_config(tmp_path))


def test_a_reader_without_a_token_is_told_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"stream\.token_file"):
        Credentials.read(reader_config(tmp_path, token_file=None))


def test_a_foreign_certificate_is_refused_at_once(tmp_path: Path) -> None:
    other = pair(tmp_path / "other")
    with served(make_store(tmp_path / "states"), tmp_path / "serve", True) as server:
        source = reader(server, tmp_path / "serve", True, certificate=str(other / CERTIFICATE))
        began = time.monotonic()
        with pytest.raises(StreamError, match=r"stream\.certificate"):
            source.manifest()
        assert time.monotonic() - began < 5.0
        source.close()


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    pair(tmp_path / "serve", days=-1)
    with served(make_store(tmp_path / "states"), tmp_path / "serve", True) as server:
        source = reader(server, tmp_path / "serve", True)
        with pytest.raises(StreamError, match="certificate"):
            source.manifest()
        source.close()


def test_plain_and_tls_do_not_meet(tmp_path: Path) -> None:
    with served(make_store(tmp_path / "states"), tmp_path / "serve", True) as server:
        config = reader_config(tmp_path / "serve", give_up_s=1.0)
        plain = StreamSource(f"grpc://127.0.0.1:{server.address.port}", config)
        with pytest.raises(StreamError):
            plain.manifest()
        plain.close()


@pytest.mark.parametrize("shown", ["own", "foreign", "expired", "none"])
def test_mutual_tls_lets_in_who_shows_a_certificate_it_signed(tmp_path: Path, shown: str) -> None:
    own = pair(tmp_path / "own", days=-1 if shown == "expired" else 365)
    foreign = pair(tmp_path / "foreign")
    states = make_store(tmp_path / "states")
    with served(states, tmp_path / "serve", True, client_ca=str(own / CERTIFICATE)) as server:
        folder = foreign if shown == "foreign" else own
        files = {"client_certificate": str(folder / CERTIFICATE), "client_key": str(folder / KEY)}
        source = reader(server, tmp_path / "serve", True, give_up_s=1.0, **({} if shown == "none" else files))
        if shown == "own":
            assert len(list(source.records(positions(1)))) == 1
        else:
            with pytest.raises(StreamError):
                source.manifest()
        source.close()


def test_a_closed_link_makes_no_calls(tmp_path: Path) -> None:
    make_files(tmp_path, [])
    config = reader_config(tmp_path)
    link = Link(parse_source("grpc://127.0.0.1:9")[0], Credentials.read(config), config)
    link.close()
    link.close()
    with pytest.raises(StreamError, match="closed"):
        link.action("manifest", bytes)
    link.tell("commit", b"", 1.0)
    assert (tmp_path / TOKEN).exists()
