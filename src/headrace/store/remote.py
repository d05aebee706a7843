"""Read a store of objects: what its log says, kept on this machine, and ranges of its shards.

In: an address such as s3://BUCKET/PREFIX, or a folder. Out: the same reader and source as of a folder. The index lies
in a cache on this machine, one copy for each state of the log; records are range reads, many at a time.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.errors import StoreError
from headrace.files import write_atomic
from headrace.record import digest
from headrace.store.commits import CommitLog, State
from headrace.store.folder_source import FolderSource
from headrace.store.lock import disk_errors
from headrace.store.manifest import Manifest
from headrace.store.objects import IN_FLIGHT, PART_BYTES, Objects, is_address
from headrace.store.reader import StoreReader
from headrace.store.shard import Key, shard_name
from headrace.store.shard_files import MappedShards
from headrace.store.verify import BASIS_NAME

SHARDS = "shards"
_PARTS_AT_ONCE = 4
Asked = TypeVar("Asked")
Found = TypeVar("Found")


class ObjectShards:
    """Shards as objects; implements `headrace.store.shard_files.Shards`."""

    hint = "run store repair with this address, then capture again: it makes only the rows that are lost"

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.where = f"{objects.address}/{SHARDS}"

    def view(self, shard: Key, offset: int, length: int) -> memoryview:
        """The bytes from `offset` on, by one range read."""
        return memoryview(self._objects.get(f"{SHARDS}/{shard_name(*shard)}", offset, offset + length))

    def names(self) -> set[str]:
        """File names of the shards that are there."""
        return set(shard_sizes(self._objects))

    def clear(self) -> None:
        """End the threads."""
        self._objects.close()


def open_reader(at: str | Path) -> StoreReader:
    """A reader of the store in a folder, or at an address.

    Raises: StoreError where there is none, and as StoreReader does.
    """
    if not is_address(str(at)):
        return StoreReader(Path(at))
    objects = Objects(str(at))
    state = read_state(objects)
    folder = _cache(objects.address) / state.store.hex() / f"{state.last:010d}"
    shards = ObjectShards(objects)
    if folder.is_dir():
        try:
            return StoreReader(folder, shards)
        except StoreError:  # the copy was damaged, not the store
            shutil.rmtree(folder)
    with disk_errors(folder.parent):
        _keep(state, objects, folder)
    return StoreReader(folder, shards)


def read_ahead(at: str | Path, read: Callable[[Asked], Found], asked: Iterable[Asked]) -> Iterator[tuple[Asked, Found]]:
    """Read in the order asked for: one at a time from a folder, from an address as many at once as training does.

    Returns: each thing asked for, with what `read` gave for it. Raises: what `read` does, in its turn.
    """
    num_ahead = IN_FLIGHT if is_address(str(at)) else 1
    ahead: deque[tuple[Asked, Future[Found]]] = deque()
    with ThreadPoolExecutor(num_ahead, thread_name_prefix="headrace-read") as pool:
        try:
            for one in asked:
                ahead.append((one, pool.submit(read, one)))
                if len(ahead) == num_ahead:
                    first, found = ahead.popleft()
                    yield first, found.result()
            while ahead:
                first, found = ahead.popleft()
                yield first, found.result()
        finally:
            for _, found in ahead:
                found.cancel()


def open_source(at: str | None, states: Path, read_ahead: int, mapped: bool = False) -> FolderSource:
    """The states of a run as a source: at an address, or in the run's folder where there is none, read or mapped.

    A fitted codec's basis is copied into that folder, where codecs are opened from.
    Raises: StoreError as FolderSource does.
    """
    if at is None:
        return FolderSource(StoreReader(states, MappedShards(states) if mapped else None), read_ahead)
    reader = open_reader(at)
    basis = reader.root / BASIS_NAME
    if basis.is_file() and not (states / BASIS_NAME).is_file():
        write_atomic(states / BASIS_NAME, basis.read_bytes())
    return FolderSource(reader, max(read_ahead, IN_FLIGHT), IN_FLIGHT)


def read_state(objects: Objects) -> State:
    """What the log of a store says. Raises: StoreError where there is none, or a commit is missing or damaged."""
    state = CommitLog(objects).read()
    if state is None:
        raise StoreError(f"a store at {objects.address}", "no commits", "run capture first, or check the address")
    return state


def shard_sizes(objects: Objects) -> dict[str, int]:
    """Bytes of each shard, by file name."""
    return {key.rpartition("/")[2]: size for key, size in objects.sizes(SHARDS).items()}


def fetch_shard(objects: Objects, name: str, num_bytes: int, path: Path) -> None:
    """Copy a shard into a file, with no more of it in memory than its ranges that are in flight.

    Raises: StoreError for one that is gone, and when the server does not answer.
    """
    key = f"{SHARDS}/{name}"
    ranges = [(start, min(start + PART_BYTES, num_bytes)) for start in range(0, num_bytes, PART_BYTES)]
    with open(path, "wb") as out, ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
        try:
            for content in pool.map(lambda span: objects.get(key, *span), ranges):
                out.write(content)
        except FileNotFoundError as exc:
            where = f"{objects.address}/{key}"
            raise StoreError(
                f"{where}, which was listed", "it is gone", "run it again when nobody else writes"
            ) from exc


def basis_key(manifest: Manifest) -> str | None:
    """Where the basis of a fitted codec lies; None where there is none."""
    named = manifest.codec.parameters.get("basis")
    return None if named is None else f"basis/{named}.safetensors"


def fetch_basis(objects: Objects, manifest: Manifest, folder: Path) -> None:
    """Copy the basis beside a manifest that names one; nothing happens where none was written yet."""
    key = basis_key(manifest)
    if key is None or (folder / BASIS_NAME).is_file():
        return
    try:
        content = objects.get(key)
    except FileNotFoundError:
        return
    if digest(content).hex() != manifest.codec.parameters["basis"]:
        raise StoreError(f"{objects.address}/{key} with its digest", digest(content).hex(), "restore it from a copy")
    write_atomic(folder / BASIS_NAME, content)


def _keep(state: State, objects: Objects, folder: Path) -> None:
    """Write a state into the cache, and remove the states before it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="new-"))
    try:
        state.write(temporary)
        fetch_basis(objects, state.stored_manifest(objects.address), temporary)
        for older in folder.parent.glob("[0-9]*"):
            if older < folder:
                shutil.rmtree(older, ignore_errors=True)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cache(address: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / digest(address.encode()).hex()
