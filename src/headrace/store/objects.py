"""Objects below one address, through fsspec.

In: keys and whole contents. Out: objects that are there whole or not at all, each created once under its final key.
Nothing is ever renamed or appended to, and no file object of fsspec is written to: one that is closed by an exception
publishes what it has. What the server refuses is a StoreError that names no credentials.
"""

import asyncio
import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import fsspec

from headrace.errors import StoreError

IN_FLIGHT = 32
PART_BYTES = 16 * 1024 * 1024  # contents of two parts or more go up in parts, four at a time
ATTEMPTS = 5  # of the protocol's own retries; s3fs tries a busy server five times as often
_PARTS_AT_ONCE = 4
_TAIL_BYTES = 64
_S3 = ("s3", "s3a")
_CONFLICTS = 5
_EXISTS = ("PreconditionFailed", "412")

Content = bytes | mmap.mmap


def is_address(at: str) -> bool:
    """Whether `at` names objects rather than a folder."""
    return "://" in at


class Objects:
    """The objects whose keys begin with an address; keys here are relative to it. Calls may come from any thread."""

    def __init__(self, address: str) -> None:
        """Raises: StoreError for an address without a bucket, with credentials in it, or of an unknown kind."""
        self.address = address.rstrip("/")
        kind, _, rest = self.address.partition("://")
        self._is_s3 = kind in _S3
        if "@" in rest:  # not repeated: it may be a secret
            hint = "give credentials as the environment or the profile that the AWS tools read"
            raise StoreError("an address without credentials", f"'@' in the {kind} address", hint)
        if not rest:
            raise StoreError("a bucket and a prefix, as in s3://BUCKET/PREFIX", address, "set store.at")
        self._root, self._errors = rest, _errors(self._is_s3)
        self._fs = _open(kind, self._is_s3)
        self._at_once = {"max_concurrency": 1} if self._is_s3 else {}  # one request; more would ask for the size first
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="headrace-objects")

    def sizes(self, under: str) -> dict[str, int]:
        """Keys that begin with `under/`, sorted, each with its bytes."""
        with self._answering(under):
            found = self._fs.find(f"{self._root}/{under}", detail=True)
        start = len(self._root) + 1
        return {path.lstrip("/")[start:]: int(entry["size"]) for path, entry in sorted(found.items())}

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object, or bytes [start, end) of it (a negative start counts from its end).

        Raises: FileNotFoundError when there is none; StoreError when the server does not answer.
        """
        try:
            with self._answering(key):
                return bytes(self._fs.cat_file(self._path(key), start=start, end=end, **self._at_once))
        except _OutOfRange:
            return b""

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Objects in the order of their keys, IN_FLIGHT at a time. Raises: as `get`."""
        return list(self._pool.map(self.get, keys))

    def create(self, key: str, content: Content) -> bool:
        """Create an object, if there is none of this key.

        Returns: False where another one is there, and stays. One with these very bytes counts as created: a request
        that was answered too late was sent twice. Contents end with a digest of all of them, so the end tells.
        Raises: StoreError when the server does not answer, or kept less than it was sent.
        """
        parts = {"chunksize": PART_BYTES, "max_concurrency": _PARTS_AT_ONCE} if self._is_s3 else {}
        body = content if self._is_s3 and len(content) >= 2 * PART_BYTES else content[:]
        for _ in range(_CONFLICTS):
            try:
                with self._answering(key):
                    self._fs.pipe_file(self._path(key), body, mode="create", **parts)
                break
            except FileExistsError:
                return self.holds(key, content)
            except _Conflict:
                continue
        if (kept := self._size(key)) != len(content):
            hint = "the server does not keep what it acknowledges; do not use it"
            raise StoreError(f"{len(content)} bytes in {self.address}/{key}", str(kept), hint)
        return True

    def holds(self, key: str, content: Content) -> bool:
        """Whether the object is there and has these bytes, of which the end tells. Raises: as `get`."""
        try:
            return self._size(key) == len(content) and self.get(key, start=-_TAIL_BYTES) == content[-_TAIL_BYTES:]
        except FileNotFoundError:
            return False

    def replace(self, key: str, content: bytes) -> None:
        """Write an object that only its owner writes."""
        with self._answering(key):
            self._fs.pipe_file(self._path(key), content)

    def copy(self, key: str, to: str) -> None:
        """Copy an object on the server, over what is there. Raises: as `get`."""
        with self._answering(key):
            self._fs.cp_file(self._path(key), self._path(to))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is gone already is no error."""
        for key in keys:
            try:
                with self._answering(key):
                    self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                continue

    def abort_uploads(self, under: str) -> int:
        """End uploads in parts that nobody completed, so that their parts are no longer kept. Returns: how many."""
        if not self._is_s3:
            return 0
        bucket, _, prefix = self._root.partition("/")
        where = f"{prefix}/{under}/" if prefix else f"{under}/"
        with self._answering(under):
            listed = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=where)
            uploads = listed.get("Uploads", [])
            for upload in uploads:
                named = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._fs.call_s3("abort_multipart_upload", **named)
        return len(uploads)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _size(self, key: str) -> int:
        with self._answering(key):
            return int(self._fs.info(self._path(key))["size"])

    @contextmanager
    def _answering(self, key: str) -> Iterator[None]:
        """Turn what went wrong into a StoreError; an object that is absent or there already is for the caller."""
        try:
            yield
        except self._errors as exc:
            code = _code(exc)
            if code == "NoSuchBucket":
                raise StoreError(f"a bucket for {self.address}", "none of this name", "create it first") from None
            if isinstance(exc, FileNotFoundError):
                raise
            if isinstance(exc, FileExistsError) or code in _EXISTS:
                raise FileExistsError(key) from None
            if code == "ConditionalRequestConflict":
                raise _Conflict(key) from None
            if code in ("InvalidRange", "416"):
                raise _OutOfRange(key) from None
            # Not `from exc`: a server's own words may repeat what it was sent.
            raise self._refused(key, exc, code) from None

    def _refused(self, key: str, exc: BaseException, code: str) -> StoreError:
        where = f"{self.address}/{key}"
        if isinstance(exc, PermissionError) or type(exc).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for an account that may do this"
            return StoreError(f"credentials that may use {where}", code or type(exc).__name__, hint)
        hint = "check AWS_ENDPOINT_URL and the network, then run it again; it goes on from what is committed"
        return StoreError(f"an object store that answers for {where}", code or type(exc).__name__, hint)


class _Conflict(Exception):
    """Two conditional requests met; the server asks to send this one again."""


class _OutOfRange(Exception):
    """A range that begins behind the end of its object."""


def _open(kind: str, is_s3: bool) -> Any:
    if not is_s3 and kind != "memory":
        hint = "what other kinds call create is not atomic everywhere; for a folder leave store.at out"
        raise StoreError("an s3:// address (or memory://, within one process)", f"{kind}://", hint)
    options: dict[str, Any] = {}
    if is_s3:
        retries = {"mode": "standard", "max_attempts": ATTEMPTS}  # of 500, 503 and connections that break
        config = {"retries": retries, "max_pool_connections": 2 * IN_FLIGHT}
        options |= {"use_listings_cache": False, "config_kwargs": config}
    try:
        return fsspec.filesystem(kind, **options)
    except ImportError as exc:
        raise StoreError("s3fs, for s3:// addresses", str(exc), "pip install 'headrace[s3]'") from exc


def _errors(is_s3: bool) -> tuple[type[Exception], ...]:
    if not is_s3:
        return (OSError,)
    try:
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return (OSError,)  # s3fs is not there either, and _open says so
    return OSError, BotoCoreError, ClientError, asyncio.TimeoutError


def _code(exc: BaseException) -> str:
    """The server's own code for an error; empty where it never answered."""
    response = getattr(exc.__cause__, "response", None) or getattr(exc, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
