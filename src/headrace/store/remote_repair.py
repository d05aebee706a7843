"""Take damaged shards out of a store of objects and keep what is intact in them.

In: an address. Out: intact records in new shards, damaged shards in `quarantine/` with their reason, no shard or upload
that nobody committed, one commit with everything, and the rows that are to be captured again, which capture then finds
missing. Each damaged shard is done with before the next one is looked at, so a repair that was killed goes on.
"""

import json
import tempfile
from pathlib import Path

from headrace.store.index import RecordIndex
from headrace.store.lease import LEASE_SECONDS
from headrace.store.remote_edit import Listed, RemoteEditor
from headrace.store.repair import Repaired, reasons
from headrace.store.shard import Key, Rows, shard_name
from headrace.store.verify import Damage, Progress, verify_shard


def repair_objects(
    address: str, payloads: bool = True, progress: Progress | None = None, lease_seconds: float = LEASE_SECONDS
) -> Repaired:
    """Verify a store as its only writer and repair it.

    Args:
        payloads: False reads no shard: the log, and what is there at all.
        progress: called with (bytes done, bytes in all) of shards.
    Raises: StoreError when somebody writes to it, when there is no store, when a commit or the basis is damaged, and
    when the server does not answer, which is never taken for damage.
    """
    with tempfile.TemporaryDirectory() as staging, RemoteEditor(address, Path(staging), lease_seconds) as editor:
        notes, listed = list(editor.notes), editor.listed() if payloads else {}
        total, done = sum(shard.num_bytes for shard in listed.values()), 0
        for key, shard in listed.items():
            path = editor.fetch(key, shard.num_bytes)
            damages = verify_shard(path.parent.parent, path.name, shard.rows, payloads=True)
            if damages:
                notes.append(_replace(editor, key, shard, damages))
            done += shard.num_bytes
            if progress is not None:
                progress(done, total)
        if num_commits := editor.compact():
            notes.append(f"{num_commits} commits are now one")
        lost = _newest(editor.before) - _newest(editor.rows)
    return Repaired(tuple(sorted({row for row, _ in lost})), tuple(notes))


def _replace(editor: RemoteEditor, key: Key, shard: Listed, damages: list[Damage]) -> str:
    editor.set_aside(key, json.dumps(reasons(damages), indent=1).encode() + b"\n")
    new = editor.take_out(key, shard.rows)
    editor.commit(for_good=False)
    kept = "nothing in it was intact" if new is None else f"what was intact in it is kept as {shard_name(*new)}"
    return f"{shard_name(*key)} is in quarantine; {kept}"


def _newest(rows: Rows) -> set[tuple[int, int]]:
    index = RecordIndex(rows)
    return set(zip(index.rows.tolist(), index.generations.tolist(), strict=True))
