import pytest
import torch

from headrace.errors import TrainError
from headrace.prepare.prepared import PreparedSet
from headrace.record import Record, Sample
from headrace.train.batches import Reader
from headrace.train.scale import measure_feature_scale
from tests.train import runs
from tests.train.runs import CODEC, ListSource, states_of


def test_each_feature_has_the_scale_of_its_tap_where_it_is_read(prepared: PreparedSet) -> None:
    scale = measure_feature_scale(Reader(prepared, ListSource(prepared), CODEC), prepared, 2)
    expected = [
        1 / torch.cat([states_of(prepared.sample(r))[1:-2, tap] for r in range(12)]).square().mean().sqrt()
        for tap in range(2)
    ]
    assert scale.dtype == torch.float32
    assert torch.allclose(scale, torch.stack(expected).repeat_interleave(32), rtol=1e-5)
    assert scale[0] > 5 * scale[-1]


def test_held_out_rows_and_holes_do_not_count(prepared: PreparedSet) -> None:
    source = ListSource(prepared, holes=[0])
    measure_feature_scale(Reader(prepared, source, CODEC), prepared, 2, num_samples=3)
    assert source.asked == [0, 1, 2, 3]


def test_the_first_token_does_not_count(prepared: PreparedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measure_feature_scale(Reader(prepared, ListSource(prepared), CODEC), prepared, 2)

    def sink(sample: Sample) -> Record:
        states = states_of(sample)
        states[0] = 1e4
        return runs.record_of(sample, states)

    source = ListSource(prepared)
    monkeypatch.setattr(source, "records", lambda positions: (sink(prepared.sample(p.row)) for p in positions))
    assert torch.equal(measure_feature_scale(Reader(prepared, source, CODEC), prepared, 2), plain)


def test_a_tap_that_is_zero_everywhere_is_refused(prepared: PreparedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ListSource(prepared)
    zeros = (
        runs.record_of(s, states_of(s) * torch.tensor([1.0, 0.0])[:, None]) for s in map(prepared.sample, range(12))
    )
    monkeypatch.setattr(source, "records", lambda _: zeros)
    with pytest.raises(TrainError, match="zero everywhere"):
        measure_feature_scale(Reader(prepared, source, CODEC), prepared, 2)


def test_features_that_do_not_split_into_taps_are_refused(prepared: PreparedSet) -> None:
    with pytest.raises(TrainError, match="3 taps"):
        measure_feature_scale(Reader(prepared, ListSource(prepared), CODEC), prepared, 3)
