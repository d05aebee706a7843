"""A prepared set that has grown: what stood in it keeps its rows, what is new comes behind.

In: a finished set whose data is not the data now given, and the samples that the data now gives. Out: the old rows in
their old order, then the new ones, and a chain of fingerprints, so that answers and states of the smaller set stay
valid. A sample that is gone or was changed is refused: rows that others are stored under cannot be taken out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.files import read_json, write_json
from headrace.prepare.prepared import SAMPLES, Draft, PreparedSet
from headrace.record import digest

CHANGES = "data"  # the field of a set's identity that may change by growing


@dataclass(frozen=True)
class Growth:
    """A finished set that is to grow."""

    old: PreparedSet
    name: str

    @classmethod
    def of(cls, folder: Path, name: str, identity: Mapping[str, Any]) -> "Growth | None":
        """The set in a folder, if it is finished and its data is all that differs."""
        stage = folder / "stage.json"
        if not stage.exists() or not (folder / "manifest.json").exists():
            return None
        stored = read_json(stage, f"remove {folder} to make this stage again")
        was = stored.get("identity")
        if not stored.get("finished") or not isinstance(was, dict) or was == dict(identity):
            return None
        if any(was.get(key) != identity.get(key) for key in {*was, *identity} - {CHANGES}):
            return None
        return cls(PreparedSet.open(folder), name)

    def ordered(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Old samples at their old rows, then the new ones in the order given.

        Raises: ConfigError saying how many old samples are gone, or went to the other side of the split.
        """
        by_id = {draft.id: draft for draft in drafts}
        old = [self.old.draft(row) for row in range(self.old.num_samples)]
        gone = [d for d in old if d.id not in by_id]
        moved = [d for d in old if d.id in by_id and by_id[d.id].heldout != d.heldout]
        wrong = gone or moved
        if wrong:
            sources = ", ".join(f"{n} of {name}" for name, n in Counter(d.source for d in wrong).most_common(6))
            what = "removed or edited" if gone else "moved between training and held out"
            raise ConfigError(
                f"{self.name} in {self.old.folder} made with the same data, or with that and more",
                f"{len(wrong)} of its {len(old)} samples {what} ({sources})",
                "restore what was changed; or choose another run folder, which makes a new set",
            )
        kept = {draft.id for draft in old}
        return [*old, *(draft for draft in drafts if draft.id not in kept)]

    def manifest(self, fingerprint: str, num_samples: int) -> dict[str, Any]:
        """What the grown set's manifest says of its growth: `fingerprint`, `samples` (its file), `chain`."""
        before = chain(self.old)
        if num_samples == self.old.num_samples:  # nothing new: the rows, and what was made of them, are the same
            return {
                key: self.old.manifest[key] for key in ("fingerprint", "samples", "chain") if key in self.old.manifest
            }
        own = digest(f"{before[-1][0]} {fingerprint}".encode()).hex()
        return {"fingerprint": own, "samples": f"samples-{len(before)}.arrow", "chain": [*before, [own, num_samples]]}

    def remove_old(self) -> None:
        """Remove the file of samples that the manifest names no more."""
        now = PreparedSet.open(self.old.folder).manifest.get("samples", SAMPLES)
        was = self.old.manifest.get("samples", SAMPLES)
        if was != now:
            (self.old.folder / was).unlink(missing_ok=True)


def chain(prepared: PreparedSet) -> list[list[Any]]:
    """[fingerprint, number of rows] of each set this one grew from, oldest first, its own last."""
    found: list[list[Any]] = prepared.manifest.get("chain", [[prepared.fingerprint, prepared.num_samples]])
    return found


def adopt(stage_folder: Path, key: str, prepared: PreparedSet) -> str | None:
    """Let a stage that was made from a smaller set go on with the set as it is now.

    Args: key: the field of the stage's identity that holds the fingerprint.
    Returns: the fingerprint it was made from, if that is one the set grew from; else None, and nothing is changed.
    """
    path = stage_folder / "stage.json"
    if not path.exists():
        return None
    stored = read_json(path, f"remove {stage_folder} to make this stage again")
    identity = stored.get("identity")
    earlier = [fingerprint for fingerprint, _ in chain(prepared)[:-1]]
    if not isinstance(identity, dict) or identity.get(key) not in earlier:
        return None
    was = str(identity[key])
    write_json(path, {**stored, "identity": {**identity, key: prepared.fingerprint}, "finished": False})
    return was
