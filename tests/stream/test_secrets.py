import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.errors import StreamError
from headrace.stream.secrets import (
    CERTIFICATE,
    KEY,
    TOKEN,
    make_files,
    read_private,
    read_token,
    same_token,
    self_signed,
)


def test_a_token_is_read_from_a_file_of_its_owner(tmp_path: Path) -> None:
    make_files(tmp_path, [])
    path = tmp_path / TOKEN
    assert len(read_token(path)) >= 40
    path.chmod(0o640)
    with pytest.raises(StreamError, match="others may read") as caught:
        read_token(path)
    assert path.read_text().strip() not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"short", b"two words that are long enough", b"\xff" * 30, b"x" * 2000])
def test_a_token_that_is_none_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StreamError) as caught:
        read_token(path)
    assert not content or content.decode(errors="replace") not in str(caught.value)


def test_tokens_are_compared_whole() -> None:
    assert same_token("abc", "abc")
    assert not same_token("ab", "abc")
    assert not same_token("é", "abc")


def test_a_certificate_names_the_hosts_it_was_made_for(tmp_path: Path) -> None:
    make_files(tmp_path, ["capture-1", "10.0.0.7"])
    made = x509.load_pem_x509_certificate((tmp_path / CERTIFICATE).read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["capture-1", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1", "::1"]
    left = made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 364 <= left.days <= 365
    assert (tmp_path / KEY).stat().st_mode & 0o077 == 0
    read_private(tmp_path / KEY, "a key")


def test_half_a_pair_is_not_completed(tmp_path: Path) -> None:
    make_files(tmp_path, [])
    (tmp_path / KEY).unlink()
    with pytest.raises(StreamError, match="alone"):
        make_files(tmp_path, [])


def test_a_certificate_can_have_expired() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    made = x509.load_pem_x509_certificate(self_signed(private, [], -1))
    assert made.not_valid_before_utc < made.not_valid_after_utc < datetime.datetime.now(datetime.UTC)
