from headrace.target.base import Target
from headrace.target.transformers_target import TransformersTarget
from tests.target.conftest import LoadTiny


def test_the_transformers_target_offers_what_the_seam_asks(load_tiny: LoadTiny) -> None:
    target: Target = load_tiny()
    assert isinstance(target, TransformersTarget)
    assert target.spec.num_blocks == 5
