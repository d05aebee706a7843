import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from headrace.errors import StoreError
from headrace.store import objects as module
from headrace.store.objects import PART_BYTES, Objects, is_address
from tests.store.conftest import S3


def test_an_object_is_created_once(s3: S3) -> None:
    objects = Objects(s3.address())
    content = os.urandom(100)
    assert objects.create("a/b", content)
    assert not objects.create("a/b", content[:-1] + b"x")
    assert objects.get("a/b") == content
    assert objects.sizes("a") == {"a/b": 100}
    assert objects.sizes("b") == {}
    objects.replace("a/b", b"new")
    assert objects.get("a/b") == b"new"
    objects.remove(["a/b", "a/none"])
    with pytest.raises(FileNotFoundError):
        objects.get("a/b")


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_a_copy_is_made_on_the_server(s3: S3, kind: str) -> None:
    objects = Objects(s3.address().replace("s3://", f"{kind}://"))
    content = os.urandom(100)
    objects.create("a/b", content)
    s3.ask()
    objects.copy("a/b", "c/d")
    objects.copy("a/b", "c/d")  # again, as after a kill
    assert not [line for line in s3.seen("GET") if "a/b" in line]
    assert (objects.get("c/d"), objects.get("a/b")) == (content, content)
    with pytest.raises(FileNotFoundError):
        objects.copy("a/none", "c/e")


def test_an_answer_that_came_too_late_counts(s3: S3) -> None:
    objects = Objects(s3.address())
    content = os.urandom(100)
    assert objects.create("k", content)
    assert objects.create("k", content)  # the same bytes: a retry of the request that made it


def test_of_many_that_create_at_once_one_does(s3: S3) -> None:
    objects = Objects(s3.address())
    contents = [os.urandom(80) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda content: objects.create("k", content), contents))
    assert made.count(True) == 1
    assert objects.get("k") == contents[made.index(True)]


def test_a_large_object_goes_up_in_parts_and_is_created_once(s3: S3) -> None:
    objects = Objects(s3.address())
    content = os.urandom(2 * PART_BYTES + 5)
    assert objects.create("k", content)
    assert [line for line in s3.seen("uploadId") if "partNumber=3" in line]
    assert not objects.create("k", content[:-1] + bytes([content[-1] ^ 1]))
    assert objects.get("k", PART_BYTES - 1, PART_BYTES + 1) == content[PART_BYTES - 1 : PART_BYTES + 1]
    assert objects.abort_uploads("") == 0


def test_ranges_end_where_the_object_does(s3: S3) -> None:
    objects = Objects(s3.address())
    objects.create("k", b"0123456789")
    assert objects.get("k", 8, 20) == b"89"
    assert objects.get("k", 20, 30) == b""
    assert objects.get("k", start=-3) == b"789"


def test_reads_are_in_flight_together(s3: S3) -> None:
    objects = Objects(s3.address())
    for k in range(32):
        objects.create(f"many/{k}", b"x")
    s3.ask(meet=[32, "/many/"])  # each request waits until so many are there, or gives up
    assert objects.get_all([f"many/{k}" for k in range(32)]) == [b"x"] * 32


def test_a_busy_server_is_asked_again(s3: S3) -> None:
    objects = Objects(s3.address())
    s3.ask(fail=[2, "SlowDown", "/k"])
    assert objects.create("k", b"x" * 70)
    s3.ask(fail=[2, "SlowDown", "/k"])
    assert objects.get("k") == b"x" * 70
    assert len(s3.seen("GET")) == 3


def test_a_server_that_stays_away_is_an_error(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    with pytest.raises(StoreError, match="an object store that answers") as caught:
        Objects(s3.address()).get("k")
    assert "AWS_ENDPOINT_URL" in str(caught.value)


def test_wrong_credentials_are_told_without_them(s3: S3) -> None:
    s3.check_credentials(True)
    try:
        objects = Objects(s3.address())
        for act in (lambda: objects.get("k"), lambda: objects.create("k", b"x"), lambda: objects.sizes("commits")):
            with pytest.raises(StoreError, match="credentials that may use s3://states/") as caught:
                act()
            shown = str(caught.value) + repr(caught.value.__cause__) + repr(caught.value.args)
            assert "of-tests" not in shown
            assert caught.value.__suppress_context__
    finally:
        s3.check_credentials(False)


def test_no_credentials_at_all_are_told(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="credentials"):
        Objects(s3.address()).create("k", b"x")


@pytest.mark.parametrize("address", ["s3://key:secret-word@states/x", "s3://", "file:///x/y", "gs://x/y"])
def test_an_address_that_cannot_be_used_is_refused(address: str) -> None:
    with pytest.raises(StoreError) as caught:
        Objects(address)
    assert "secret-word" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_an_error(s3: S3) -> None:
    with pytest.raises(StoreError, match="a bucket for s3://nowhere/x"):
        Objects("s3://nowhere/x").create("k", b"x")


def test_objects_in_memory_behave_alike() -> None:
    objects = Objects("memory://of-one-process/x")
    content = os.urandom(90)
    assert objects.create("k", content)
    assert not objects.create("k", content[:-1])
    assert objects.get("k", 1, 3) == content[1:3]
    assert objects.sizes("") == {"k": 90} or objects.sizes("k") == {"k": 90}
    objects.remove(["k"])
    assert objects.abort_uploads("k") == 0


def test_threads_end_with_close(s3: S3) -> None:
    objects = Objects(s3.address())
    objects.get_all([])
    objects.close()
    objects.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-objects")]


def test_an_address_is_told_from_a_folder() -> None:
    assert is_address("s3://bucket/prefix")
    assert not is_address("runs/demo/states")
