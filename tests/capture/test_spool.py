"""What is taken from states that came with the answers, and what is not. Whole runs: test_one_pass.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.capture.capture import GroupEncoder, capture_taps, states_manifest
from headrace.capture.spool import Spool, remove_spool, spool_root
from headrace.codec.base import RawCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import short_spec
from headrace.config import RunFile, RunFolder
from headrace.errors import StoreError
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample, sample_id
from headrace.store.lock import StoreLock
from headrace.store.manifest import Manifest
from headrace.store.writer import StoreWriter
from headrace.target.transformers_target import TransformersTarget
from headrace.token_rule import TokenRule

RULE = TokenRule("context")


def sample(row: int, num_tokens: int = 12) -> Sample:
    ids = np.arange(3 + row, 3 + row + num_tokens, dtype=np.int32)
    mask = (np.arange(num_tokens) >= 4).astype(np.uint8)
    return Sample(row, sample_id(ids, mask), ids, mask)


def states(row: int, num_tokens: int = 12) -> torch.Tensor:
    return torch.randn(num_tokens, 2, 32, generator=torch.Generator().manual_seed(row)).to(torch.bfloat16)


@pytest.fixture
def encoder(cfg: RunFile, target: TransformersTarget) -> GroupEncoder:
    codec = open_codec(short_spec("raw", 2, 32, "bfloat16"))
    return GroupEncoder(target, capture_taps(cfg, 5), codec, RULE)


@pytest.fixture
def manifest(cfg: RunFile, folder: RunFolder, encoder: GroupEncoder) -> Manifest:
    """Of rows 0 to 2, which stand in the spool when this is there."""
    needed = cfg.model_copy(update={"capture": cfg.capture.model_copy(update={"tokens": "needed"})})
    prompts = PreparedSet.open(folder.prompts)
    found = states_manifest(needed, encoder.target, encoder.taps, encoder.codec, prompts, None)
    with StoreWriter(spool_root(folder), found, 2**20, 60.0) as writer:
        for row in range(3):
            writer.add(encoder.record(sample(row), states(row), writer.generation))
    return replace(found, prepared="the prepared set")


def test_a_sample_is_found_by_its_id_at_any_row(folder: RunFolder, manifest: Manifest, encoder: GroupEncoder) -> None:
    spool = Spool.open(folder, manifest)
    assert spool is not None
    own = replace(sample(1), row=77)
    record = spool.take(own, encoder, 5)
    assert record is not None
    assert (record.row, record.id, record.generation) == (77, own.id, 5)
    assert record.num_tokens == RULE.span(own.loss_mask)[1] == 10
    assert bytes(record.segments[0].payload) == states(1)[:10].view(torch.uint8).numpy().tobytes()
    assert spool.take(sample(9), encoder, 5) is None
    assert spool.num_damaged == 0


def test_raw_states_are_encoded_when_they_are_taken(
    folder: RunFolder, manifest: Manifest, encoder: GroupEncoder
) -> None:
    codec = open_codec(short_spec("lossless", 2, 32, "bfloat16"))
    other = replace(encoder, codec=codec)
    spool = Spool.open(folder, replace(manifest, codec=codec.spec))
    assert spool is not None
    record = spool.take(sample(2), other, 1)
    assert record is not None
    assert not isinstance(codec, RawCodec)
    back = codec.reconstruct(codec.features(record.segments[0].payload, 10))
    assert torch.equal(back, states(2)[:10])


def test_a_damaged_record_and_one_of_another_span_are_passed_over(
    folder: RunFolder, manifest: Manifest, encoder: GroupEncoder
) -> None:
    (shard,) = (spool_root(folder) / "shards").glob("*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    spool = Spool.open(folder, manifest)
    assert spool is not None
    taken = [spool.take(sample(row), encoder, 1) for row in range(3)]
    assert len([record for record in taken if record is None]) == spool.num_damaged == 1
    longer = replace(encoder, rule=TokenRule("supervised"))
    sound = next(row for row in range(3) if taken[row] is not None)
    assert spool.take(sample(sound), longer, 1) is None
    assert spool.num_damaged == 2


def test_states_of_another_identity_are_refused_and_none_are_none(
    folder: RunFolder, manifest: Manifest, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"token_rule 'all'.*(?s:.*)"):
        Spool.open(folder, replace(manifest, token_rule="all"))
    assert Spool.open(RunFolder(tmp_path / "none"), manifest) is None


def test_the_spool_is_removed_whole_and_not_while_answers_are_written(folder: RunFolder, manifest: Manifest) -> None:
    lock = StoreLock(spool_root(folder))
    remove_spool(folder)
    assert spool_root(folder).exists()
    lock.release()
    leftover = spool_root(folder).with_name("states.taken")
    leftover.mkdir()
    (leftover / "half").touch()
    remove_spool(folder)
    assert not spool_root(folder).exists()
    assert not leftover.exists()
    remove_spool(folder)
