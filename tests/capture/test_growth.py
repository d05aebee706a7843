"""States stay valid when the prepared set grows."""

from pathlib import Path

import numpy as np
import pytest

from headrace.capture.capture import capture
from headrace.capture.growth import adopt_growth
from headrace.config import RunFile, RunFolder
from headrace.errors import ConfigError, StoreError
from headrace.prepare.grow import chain
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.progress import Silent
from headrace.record import sample_id
from headrace.store.reader import StoreReader
from headrace.store.verify import verify
from headrace.target.transformers_target import TransformersTarget
from tests.capture.conftest import LENGTHS
from tests.capture.test_capture import payloads


def grow(folder: Path, number: int) -> PreparedSet:
    """As prepare does: old rows first, the chain in the manifest."""
    old = PreparedSet.open(folder)
    drafts = [old.draft(row) for row in range(old.num_samples)]
    for row in range(number):
        ids = np.random.default_rng(1000 + row).integers(3, 64, 6).astype(np.int32)
        mask = (np.arange(6) >= 3).astype(np.uint8)
        drafts.append(Draft(sample_id(ids, mask), ids, mask, "new", heldout=False))
    chained = [*chain(old), ["grown", len(drafts)]]
    write_prepared(folder, drafts, {"fingerprint": "grown", "samples": "samples-1.arrow", "chain": chained})
    return PreparedSet.open(folder)


def test_only_new_rows_are_captured(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    capture(cfg, folder, target, Silent())
    before = payloads(folder)
    shards = {path.name: path.read_bytes() for path in (folder.states / "shards").iterdir()}
    grow(folder.prepared, 4)
    summary = capture(cfg, folder, target, Silent())
    after = payloads(folder)
    assert summary["num_records"] == len(LENGTHS) + 4
    assert {row: after[row] for row in before} == before
    assert all((folder.states / "shards" / name).read_bytes() == content for name, content in shards.items())
    assert StoreReader(folder.states).manifest.prepared == "grown"
    assert not verify(folder.states)


def test_a_folder_of_another_set_is_left_alone(cfg: RunFile, folder: RunFolder, target: TransformersTarget) -> None:
    capture(cfg, folder, target, Silent())
    grown = grow(folder.prepared, 1)
    assert adopt_growth(folder.answers, grown) is None  # no store
    write_prepared(folder.prepared, [grown.draft(0)], {"fingerprint": "other"})
    assert adopt_growth(folder.states, PreparedSet.open(folder.prepared)) is None
    with pytest.raises((ConfigError, StoreError), match="prepared"):
        capture(cfg, folder, target, Silent())


def test_an_adoption_that_was_stopped_half_way_is_done(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(cfg, folder, target, Silent())
    grown = grow(folder.prepared, 2)
    with monkeypatch.context() as patched:
        patched.setattr("headrace.capture.growth.adopt", lambda *_: None)
        adopt_growth(folder.states, grown)
    assert (
        adopt_growth(folder.states, grown)
        == f"the prepared set has grown from {len(LENGTHS)} to {grown.num_samples} rows"
    )
    assert capture(cfg, folder, target, Silent())["num_records"] == grown.num_samples
