"""A codec is fitted on training rows of a store, all sources in turn, and judged on held-out rows."""

from pathlib import Path

import pytest

from headrace.calibrate import Slice, Wish, compare_codecs, fit_codec
from headrace.codec.registry import chosen_spec
from headrace.config import RunFolder
from headrace.errors import CodecError, ExportError
from headrace.progress import Silent
from headrace.testing.tiny_target import HIDDEN_SIZE, save_tiny_target
from tests.train.runs import TAPS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("run")
    return make_run(root / "run", save_tiny_target(root / "target"), num_samples=40, num_heldout=6)


def test_a_slice_gives_the_stored_states_of_its_rows_as_often_as_asked(run: RunFolder) -> None:
    part = Slice(run, heldout=False, max_tokens=100)
    assert 100 <= sum(len(own) for _, own in part()) < 120
    assert [len(own) for _, own in part()] == [len(own) for _, own in part()]
    assert not set(part.rows) & set(Slice(run, heldout=True, max_tokens=10**6).rows)
    assert next(part())[1].shape[1:] == (len(TAPS), HIDDEN_SIZE)


def test_a_fit_can_be_named_by_capture_and_says_what_it_loses(run: RunFolder, tmp_path: Path) -> None:
    found = fit_codec(run, Wish(rank=40, bits=8), tmp_path / "codec", Silent())
    spec, folder = chosen_spec(str(tmp_path / "codec"), len(TAPS), HIDDEN_SIZE, "float32")
    assert folder == tmp_path / "codec"
    assert spec.num_features == found["num_features"] == 40
    assert 0 < found["lost"] < 1
    assert len(found["lost_by_tap"]) == len(TAPS)
    assert set(found["lost_by_source"]) == {"noise"}
    whole = fit_codec(run, Wish(rank=64, bits=8), tmp_path / "whole", Silent())
    assert whole["lost"] < 1e-3 < found["lost"]
    rows = compare_codecs(run, ["fp8", "rotated:4", str(tmp_path / "codec")])
    assert [row["codec"] for row in rows] == ["fp8", "rotated:4", str(tmp_path / "codec")]
    assert rows[0]["lost"] < rows[1]["lost"] < rows[2]["lost"]


def test_what_cannot_be_fitted_is_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="rank"):
        fit_codec(run, Wish(rank=99, bits=8), tmp_path, Silent())
    with pytest.raises(ExportError):
        fit_codec(run, Wish(rank=4, bits=8, drafter=tmp_path), tmp_path, Silent())
    assert not list(tmp_path.iterdir())
