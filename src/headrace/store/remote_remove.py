"""Take records out of a store of objects for good.

In: rows of the prepared set, or all that newer records supersede. Out: the shards that held them, written anew without
them, in one commit: all of it or, after a kill or damage, nothing. Shards are fetched only where something stays in
them, or where the log does not say what they hold.
"""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from headrace.errors import StoreError
from headrace.store.lease import LEASE_SECONDS
from headrace.store.remote_edit import Listed, RemoteEditor
from headrace.store.remove import Removed, Wish, check_intact
from headrace.store.shard import Key, read_trailer, shard_name
from headrace.store.verify import Progress


def remove_objects(
    address: str,
    rows: Collection[int],
    superseded: bool = False,
    progress: Progress | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> Removed:
    """Remove every generation of these rows and, if asked, whatever newer records supersede.

    Args: progress: called with (shards done, shards in all).
    Raises: StoreError, with nothing removed, for a row without a record, for damage in a shard that is to be written
    anew, and when somebody else writes.
    """
    num_segments = num_shards = freed = 0
    with tempfile.TemporaryDirectory() as staging, RemoteEditor(address, Path(staging), lease_seconds) as editor:
        wish = Wish.of(editor.rows, rows, superseded, address)
        before = editor.listed()
        for done, (key, listed) in enumerate(before.items(), 1):
            kept = listed.rows[wish.kept(listed.rows)]
            if len(kept) < len(listed.rows) or _hides(editor, key, listed, wish):
                if len(kept):
                    check_intact(editor.fetch(key, listed.num_bytes), kept)
                editor.take_out(key, kept)
                num_segments, num_shards = num_segments + listed.num_rows - len(kept), num_shards + 1
            if progress is not None:
                progress(done, len(before))
        if num_shards:
            editor.commit(for_good=True)
            freed = _size(before) - _size(editor.listed())
    return Removed(num_segments, num_shards, freed)


def _hides(editor: RemoteEditor, key: Key, listed: Listed, wish: Wish) -> bool:
    """Whether a shard holds records to be removed that the log no longer names, because newer ones supersede them."""
    if len(listed.rows) == listed.num_rows:
        return False
    if wish.newest is not None:
        return True
    try:
        own = read_trailer(editor.fetch(key, listed.num_bytes))
    except StoreError as exc:
        raise StoreError(f"{shard_name(*key)} as it was sealed", exc.args[1], "run store repair first") from exc
    return not wish.kept(own).all()


def _size(shards: Mapping[Key, Listed]) -> int:
    return sum(shard.num_bytes for shard in shards.values())
