import numpy as np

from headrace.testing.states import fake_manifest, fake_record, fake_sample, same_records


def test_the_same_arguments_make_the_same_record() -> None:
    assert same_records(fake_record(3, 1, num_segments=2), fake_record(3, 1, num_segments=2))


def test_another_generation_has_the_same_ids_and_another_payload() -> None:
    a, b = fake_record(3, 1), fake_record(3, 2)
    assert a.id == b.id
    assert a.segments[0].payload != b.segments[0].payload
    assert not same_records(a, b)


def test_segments_cover_every_token_once() -> None:
    sample = fake_sample(5, num_tokens=13)
    record = fake_record(5, 1, num_segments=4, num_tokens=13)
    assert np.array_equal(record.input_ids, sample.input_ids)
    assert np.array_equal(record.loss_mask, sample.loss_mask)


def test_a_manifest_takes_changes() -> None:
    assert fake_manifest(prepared="other").identity()["prepared"] == "other"
