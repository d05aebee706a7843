from pathlib import Path

import numpy as np
from transformers import AutoConfig

from headrace.config import DrafterConfig
from headrace.drafter.derive import derive_shape
from headrace.drafter.model import Drafter
from headrace.prepare.prepared import PreparedSet
from headrace.target.head import load_head
from headrace.train.batches import Reader
from headrace.train.heldout import HeldOut
from tests.train.runs import CODEC, TAPS, ListSource, drafts, write_set


def test_only_held_out_rows_are_read_and_spread_evenly(tmp_path: Path) -> None:
    prepared = write_set(tmp_path, drafts(20, 11))
    source = ListSource(prepared)
    heldout = HeldOut.read(Reader(prepared, source, CODEC), prepared, 3)
    assert source.asked == [9, 14, 19]
    assert [s.row for s in heldout.samples] == [9, 14, 19]
    assert all(s.heldout for s in heldout.samples)


def test_fewer_rows_than_asked_are_all_read_but_holes(tmp_path: Path) -> None:
    prepared = write_set(tmp_path, drafts(6, 4))
    heldout = HeldOut.read(Reader(prepared, ListSource(prepared, holes=[4]), CODEC), prepared, 99)
    assert [s.row for s in heldout.samples] == [2, 3, 5]


def test_without_held_out_rows_there_is_no_tau(tmp_path: Path, tiny_target: Path) -> None:
    prepared = write_set(tmp_path, drafts(4, 0))
    heldout = HeldOut.read(Reader(prepared, ListSource(prepared), CODEC), prepared, 8)
    assert heldout.samples == []
    config = AutoConfig.from_pretrained(tiny_target)
    shape = derive_shape(DrafterConfig(mask_token_id=63), config, TAPS, CODEC.num_features, {})
    assert heldout.tau(Drafter(shape), load_head(tiny_target, config), autocast=False) is None


def test_tau_of_an_untrained_drafter_is_about_one(prepared: PreparedSet, tiny_target: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_target)
    shape = derive_shape(DrafterConfig(mask_token_id=63, num_layers=1), config, TAPS, CODEC.num_features, {})
    heldout = HeldOut.read(Reader(prepared, ListSource(prepared), CODEC), prepared, 8)
    for autocast in (False, True):
        tau = heldout.tau(Drafter(shape), load_head(tiny_target, config), autocast)
        assert tau is not None
        assert 1.0 <= tau < 1.5
    assert np.all([f.shape[1] == CODEC.num_features for f in heldout.features])
