"""Write a store of objects: shards are made in a folder, uploaded whole, then committed.

In: records, as StoreWriter. Out: immutable shard objects and the log that makes them count. The folder holds the open
shard, and sealed ones only until they are committed; what a kill leaves there is committed by the next writer in the
same folder. A writer whose place was taken commits nothing. Layout: docs/formats/objects-1.md.
"""

import mmap
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from headrace.config import StoreConfig
from headrace.errors import StoreError
from headrace.files import write_atomic
from headrace.record import digest
from headrace.store import failures, journal
from headrace.store.commits import ADD, CommitLog
from headrace.store.digested import dump_digested
from headrace.store.failures import Failure, mend_failures, read_failures
from headrace.store.journal import block, blocks_of, index_rows
from headrace.store.lease import LEASE_SECONDS, Lease
from headrace.store.manifest import FILE_NAME as MANIFEST_NAME
from headrace.store.manifest import Manifest
from headrace.store.mend import Mended, mend
from headrace.store.objects import Objects
from headrace.store.remote import SHARDS, basis_key, fetch_basis, shard_sizes
from headrace.store.shard import Key, Rows, parse_shard_name, sealed_shards, shard_name
from headrace.store.shard_files import STAGING_MARK
from headrace.store.verify import BASIS_NAME
from headrace.store.writer import StoreWriter

COMPACT_AFTER = 8  # commits that a close leaves as they are


def open_writer(root: Path, manifest: Manifest, own: StoreConfig, grown_from: Collection[str] = ()) -> StoreWriter:
    """The writer that `store.at` asks for: of the folder `root`, or of objects with `root` as its staging folder.

    Args: grown_from: fingerprints of prepared sets that this manifest's grew from.
    Raises: StoreError as the writers do.
    """
    if own.at is None:
        return StoreWriter(root, manifest, own.shard_bytes, own.shard_seconds, max_bytes=own.max_bytes)
    kept = own.shard_bytes, own.shard_seconds
    return RemoteWriter(own.at, root, manifest, *kept, max_bytes=own.max_bytes, grown_from=grown_from)


class RemoteWriter(StoreWriter):
    """The only writer of the store at `address`, as far as `headrace.store.lease` and the log can say."""

    def __init__(
        self,
        address: str,
        root: Path,
        manifest: Manifest,
        shard_bytes: int,
        shard_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int | None = None,
        grown_from: Collection[str] = (),
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Create a store, or resume one; waits for a lease that a dead writer on another machine left.

        Args:
            root: the staging folder, on a disk of this machine; it holds one shard at a time.
            max_bytes: what shards and journal may take at the address.
        Raises: StoreError as StoreWriter does, and when the server refuses or does not answer.
        """
        self._objects = Objects(address)
        self._log = CommitLog(self._objects)
        self._grown_from, self._lease_seconds = grown_from, lease_seconds
        self._lease: Lease | None = None
        self._claimed = 0
        self._failed_lines = b""
        self._damaged_at_opening = False
        try:
            super().__init__(root, manifest, shard_bytes, shard_seconds, clock, max_bytes)
        except StoreError:
            self._give_up()
            raise
        self._superseded = self._superseded or self._damaged_at_opening

    def fail(self, id: bytes, row: int, reason: str, permanent: bool) -> None:
        """As StoreWriter.fail; committed at once."""
        failure = Failure(row=row, id=id.hex(), reason=reason, permanent=permanent, generation=self.generation)
        line = dump_digested(asdict(failure)).encode() + b"\n"
        with self._turn:
            with self._guarded():
                self._log.append(ADD, self.generation, failed=line)
            self._failed_lines += line
            super().fail(id, row, reason, permanent)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the folder: the shard that is open or going up, with the record that filled it."""
        return 2 * self._shard_bytes

    def close(self) -> None:
        """As StoreWriter.close; then others may write at once."""
        if not self._lock.held:
            return
        try:
            super().close()
        finally:
            self._give_up()

    def _give_up(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._objects.close()

    def _take_over(self) -> Mended:
        if (self.root / MANIFEST_NAME).exists():
            self._check_stored(Manifest.read(self.root), str(self.root))
        else:
            self._check_manifest()
        state = self._log.read()
        if state is not None:
            stored = self._check_stored(state.stored_manifest(self._objects.address), self._objects.address)
            self.notes.extend(f"provenance: {change}" for change in stored.provenance_changes(self.manifest))
        self._check_staged()
        self._lease = Lease(self._objects, _owner(self.root), self._lease_seconds)
        staged = [generation for generation, _ in sealed_shards(self.root).values()]
        known = [0 if state is None else state.generation, *staged]
        self._claimed = self._lease.claim(max(known) + 1)
        state = self._log.begin(self._claimed, self.manifest.to_text().encode())
        self._failed_lines = state.failed
        self._commit_failures()
        replace(state, failed=self._failed_lines).write(self.root)
        fetch_basis(self._objects, self.manifest, self.root)
        there = shard_sizes(self._objects)
        listed = journal.scan_journal(self.root / journal.FILE_NAME).shards
        removed = {key for key, num_rows in listed.items() if num_rows == 0}
        elsewhere = {key: self._size(there[name]) for key in listed if (name := shard_name(*key)) in there}
        self._clear_removed(removed)
        mended = mend(self.root, {**elsewhere, **dict.fromkeys(removed, 0)})
        self._damaged_at_opening = not set(listed) <= set(mended.shards)
        self._commit_staged(mended, set(listed), there)
        self._clear_orphans(there, set(mended.shards) - removed)
        return replace(mended, last_generation=self._claimed - 1)

    def _check_stored(self, stored: Manifest, where: str) -> Manifest:
        if stored.prepared in self._grown_from:
            stored = replace(stored, prepared=self.manifest.prepared)
        stored.compare(self.manifest, where)
        return stored

    def _check_staged(self) -> None:
        """Refuse shards of this folder whose names others have taken, before anything here is changed."""
        there = shard_sizes(self._objects)
        for name in sealed_shards(self.root):
            if name in there:
                with self._mapped(name) as whole:
                    if not self._objects.holds(f"{SHARDS}/{name}", whole):
                        raise self._other_shard(name)

    def _list(self, index: Rows, number: int) -> None:
        self._commit(index, (self.generation, number))
        super()._list(index, number)
        (self.root / "shards" / shard_name(self.generation, number)).unlink()

    def _commit(self, index: Rows, shard: Key) -> None:
        """Upload a sealed shard and make it count."""
        self._put_basis()
        self._upload(shard_name(*shard))
        self._log.append(ADD, self._claimed, blocks=block(index, *shard, len(index)))

    def _upload(self, name: str) -> None:
        with self._mapped(name) as whole:
            if not self._objects.create(f"{SHARDS}/{name}", whole):
                raise self._other_shard(name)

    @contextmanager
    def _mapped(self, name: str) -> Iterator[mmap.mmap]:
        with open(self.root / "shards" / name, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
            yield whole

    def _other_shard(self, name: str) -> StoreError:
        hint = "two folders of states were moved to one address; merge them into one first"
        return StoreError(f"{name} as in {self.root}, or none, at {self._objects.address}", "another shard", hint)

    def _commit_failures(self) -> None:
        """Commit failures of a folder that had its own store before."""
        path = self.root / failures.FILE_NAME
        if path.exists():
            mend_failures(path)
            read_failures(path)  # a damaged line is refused
            known = set(self._failed_lines.splitlines(keepends=True))
            new = b"".join(line for line in path.read_bytes().splitlines(keepends=True) if line not in known)
            if new:
                self._log.append(ADD, self._claimed, failed=new)
                self._failed_lines += new

    def _put_basis(self) -> None:
        key = basis_key(self.manifest)
        if key is None or self._log.num_since_full:
            return
        content = (self.root / BASIS_NAME).read_bytes()
        if digest(content).hex() != self.manifest.codec.parameters["basis"]:
            raise StoreError("the basis that the manifest names", digest(content).hex(), "capture into another address")
        self._objects.create(key, content)

    def _size(self, num_bytes: int) -> int:
        """Bytes to count for a shard that is there: one with fewer than the log says is given up."""
        return num_bytes

    def _clear_removed(self, removed: set[Key]) -> None:
        """Leave out what was committed from here, stayed because of a kill, and was removed at the address since."""
        for name, key in sealed_shards(self.root).items():
            if key in removed:
                (self.root / "shards" / name).unlink()

    def _commit_staged(self, mended: Mended, listed: set[Key], there: Mapping[str, int]) -> None:
        """Commit what an earlier writer sealed in this folder, and remove what is committed."""
        for name, key in sealed_shards(self.root).items():
            if key in listed and name not in there:
                self._upload(name)  # it was lost at the address
            elif key not in listed and key in mended.shards:
                mine = (mended.rows["shard_generation"] == key[0]) & (mended.rows["shard_number"] == key[1])
                self._commit(index_rows(mended.rows[mine]), key)
                self.notes.append(f"{name} was sealed here and not committed; it is now")
            if key in mended.shards:
                (self.root / "shards" / name).unlink()

    def _clear_orphans(self, there: dict[str, int], known: set[Key]) -> None:
        """Remove shards of earlier writers that were never committed: the opening commit keeps their commits out."""
        keys = {name: parse_shard_name(name) for name in there}
        orphans = [n for n, key in keys.items() if key and key not in known and key[0] < self._claimed]
        self._objects.remove(f"{SHARDS}/{name}" for name in orphans)
        if orphans:
            self.notes.append(f"{len(orphans)} shards were uploaded and never committed; they are removed")
        if ended := self._objects.abort_uploads(SHARDS):
            self.notes.append(f"{ended} uploads were never completed; they are aborted")

    def _compact(self) -> None:
        if not self._superseded and self._log.num_since_full <= COMPACT_AFTER:
            return
        self._replace_log(self._newest())
        super()._compact()

    def _replace_log(self, rows: Rows) -> None:
        """Make one commit of everything that counts: these rows, of the shards known."""
        with self._guarded():
            text = self.manifest.to_text().encode()
            self._log.replace(self.generation, text, blocks_of(rows, self._shards), self._failed_lines)


def _owner(root: Path) -> str:
    """A token of this staging folder, whose lock says that no other writer of it is alive."""
    path = root / STAGING_MARK
    if not path.exists():
        write_atomic(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii")
