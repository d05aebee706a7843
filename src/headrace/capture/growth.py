"""States of a prepared set that has grown.

In: a states folder and the prepared set as it is now. Out: the folder belongs to the grown set, if its states are those
of a set that this one grew from: rows keep their numbers, so what is stored stays valid and only new rows are missing.
"""

from dataclasses import replace
from pathlib import Path

from headrace.prepare.grow import adopt, chain
from headrace.prepare.prepared import PreparedSet
from headrace.store.manifest import FILE_NAME, Manifest


def adopt_growth(states: Path, prepared: PreparedSet) -> str | None:
    """Let a store go on with the prepared set as it is now; the caller holds the folder alone.

    The manifest first, then the stage: stopped between the two, the next start does the rest.

    Returns: a sentence for the log where the store was made from a smaller set; else None, and nothing is changed.
    Raises: StoreError for a damaged manifest.
    """
    if not (states / FILE_NAME).exists():
        return None
    manifest = Manifest.read(states)
    earlier = dict(chain(prepared)[:-1])
    if manifest.prepared in earlier:
        replace(manifest, prepared=prepared.fingerprint).write(states)
    elif manifest.prepared != prepared.fingerprint:
        return None
    was = adopt(states, "prepared", prepared)
    return None if was is None else f"the prepared set has grown from {earlier[was]} to {prepared.num_samples} rows"
