"""Check every byte of a store of objects that a reader would parse, and change none.

In: an address. Out: what is damaged, as `verify` names it. One shard at a time is fetched into a temporary folder
and looked at there as in any folder; commits are checked by reading them.
"""

import tempfile
from pathlib import Path

from headrace.store import journal
from headrace.store.journal import scan_journal
from headrace.store.objects import Objects
from headrace.store.remote import SHARDS, fetch_basis, fetch_shard, read_state, shard_sizes
from headrace.store.shard import shard_name
from headrace.store.verify import Damage, Progress, rows_of, verify_basis, verify_shard


def verify_objects(address: str, progress: Progress | None = None) -> list[Damage]:
    """Read the whole store, the digests of every message and index.

    Args: progress: called with (bytes done, bytes in all) of shards.
    Raises: StoreError when there is no store, and naming a commit that is missing or damaged: then nobody knows what
    the store holds.
    """
    objects = Objects(address)
    state = read_state(objects)
    sizes = shard_sizes(objects)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        state.write(folder)
        fetch_basis(objects, state.stored_manifest(address), folder)
        found = verify_basis(folder, state.stored_manifest(address)) if state.blocks else []
        listed = scan_journal(folder / journal.FILE_NAME)
        (folder / SHARDS).mkdir()
        total, done = sum(sizes.get(shard_name(*key), 0) for key in listed.starts), 0
        for key in sorted(listed.starts):
            name, rows = shard_name(*key), rows_of(listed, key)
            if name not in sizes:
                found += [Damage(name, int(r["offset"]), int(r["row"]), "no such shard") for r in rows]
                continue
            fetch_shard(objects, name, sizes[name], folder / SHARDS / name)
            found += verify_shard(folder, name, rows, payloads=True)
            (folder / SHARDS / name).unlink()
            done += sizes[name]
            if progress is not None:
                progress(done, total)
    objects.close()
    return found
