"""A run on its way out: what is refused before anything is written."""

from pathlib import Path

import pytest
import torch

from headrace.config import RunFolder
from headrace.errors import ConfigError, ExportError, StoreError
from headrace.interchange.outgoing import Outgoing
from headrace.taps import FINAL_POST_NORM, FINAL_PRE_NORM
from tests.interchange.runs import HELDOUT, LENGTHS, captured, states_of, write_set


def test_training_rows_come_first(run: RunFolder) -> None:
    outgoing = Outgoing(run)
    assert outgoing.rows == [0, 1, 3, 4, 6, 7, *HELDOUT]
    assert outgoing.num_heldout == len(HELDOUT)
    assert [str(tap) for tap in outgoing.feature_taps] == ["after_block:0", "after_block:2"]
    assert outgoing.final == FINAL_PRE_NORM


def test_a_sample_is_split_into_features_and_the_last_state(run: RunFolder) -> None:
    outgoing, states = Outgoing(run), states_of(run)
    sent = outgoing.sent(3, FINAL_PRE_NORM)
    expected = states[sent.sample.id]
    assert sent.final_TH is not None
    assert torch.equal(torch.cat([sent.features_TLH, sent.final_TH[:, None]], 1), expected)
    assert outgoing.sent(3, None).final_TH is None
    assert expected.shape == (LENGTHS[3], 3, 32)


@pytest.mark.parametrize(
    ("which", "with_target", "pre", "post"),
    [
        ("run", False, True, False),
        ("run", True, True, True),
        ("run_normed", False, False, True),
        ("run_normed", True, False, True),
        ("run_without_final", True, False, False),
    ],
)
def test_a_last_state_is_there_or_leads_to_the_wanted_one(
    which: str, with_target: bool, pre: bool, post: bool, tiny: Path, request: pytest.FixtureRequest
) -> None:
    outgoing = Outgoing(request.getfixturevalue(which), tiny if with_target else None)
    for wanted, good in ((FINAL_PRE_NORM, pre), (FINAL_POST_NORM, post)):
        if good:
            outgoing.check_final(wanted, "a peer")
            continue
        with pytest.raises(ExportError, match="a peer reads"):
            outgoing.check_final(wanted, "a peer")


def test_another_prepared_set_is_refused(run: RunFolder, tmp_path: Path) -> None:
    mixed = RunFolder(tmp_path / "mixed")
    write_set(mixed.prepared, LENGTHS[:4], ())
    mixed.states.symlink_to(run.states)
    with pytest.raises(ExportError, match="set of 4, not set of 8"):
        Outgoing(mixed)


def test_taps_that_do_not_ascend_are_refused(tiny: Path, tmp_path: Path) -> None:
    run = captured(tiny, tmp_path, taps=("after_block:2", "after_block:0"), lengths=(5,), heldout=())
    with pytest.raises(ConfigError, match="ascending"):
        Outgoing(run)


def test_no_states_are_an_error(tmp_path: Path) -> None:
    write_set(tmp_path / "prepared")
    with pytest.raises(StoreError):
        Outgoing(RunFolder(tmp_path))
