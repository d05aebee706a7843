"""Made-up states for tests: samples, records and manifests that differ where they should.

In: a row and a seed. Out: the same sample or record each time; no target, no torch.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.codec.spec import CodecSpec
from headrace.record import Record, Sample, make_record, sample_id
from headrace.store.manifest import Manifest, make_manifest

TARGET: dict[str, Any] = {
    "model": "tiny",
    "architecture": "LlamaForCausalLM",
    "num_blocks": 4,
    "hidden_size": 8,
    "vocab_size": 64,
    "dtype": "float32",
    "quantisation": "none",
    "weights_hash": "aa",
    "tokenizer_hash": "bb",
    "template_hash": "cc",
    "engine": "fake",
    "engine_version": "0",
}


def fake_manifest(**changes: Any) -> Manifest:
    """A manifest of a tiny target with two taps; `changes` replace its fields."""
    codec = CodecSpec("raw", 0, 2, 8, "float32")
    return replace(make_manifest(TARGET, ["after_block:0", "after_block:2"], codec, "prepared-1", {}), **changes)


def fake_sample(row: int, num_tokens: int = 12, seed: int = 0) -> Sample:
    """A sample of which the second half is trained."""
    rng = np.random.default_rng([seed, row])
    ids = rng.integers(0, TARGET["vocab_size"], num_tokens).astype(np.int32)
    mask = (np.arange(num_tokens) >= num_tokens // 2).astype(np.uint8)
    return Sample(row=row, id=sample_id(ids, mask), input_ids=ids, loss_mask=mask)


def fake_record(row: int, generation: int, num_segments: int = 1, num_tokens: int = 12, seed: int = 0) -> Record:
    """A record with random payloads of 64 bytes a token; another generation has another payload."""
    sample = fake_sample(row, num_tokens, seed)
    rng = np.random.default_rng([seed, row, generation])
    edges = np.linspace(0, num_tokens, num_segments + 1).astype(int).tolist()
    spans = list(pairwise(edges))
    return make_record(sample, spans, [rng.bytes(64 * (end - start)) for start, end in spans], generation)


def same_records(a: Record, b: Record) -> bool:
    """Whether two records are equal in every byte, generation included."""
    return len(a.segments) == len(b.segments) and all(
        (x.row, x.id, x.generation, x.segment, x.num_segments, x.token_start, x.payload)
        == (y.row, y.id, y.generation, y.segment, y.num_segments, y.token_start, y.payload)
        and np.array_equal(x.input_ids, y.input_ids)
        and np.array_equal(x.loss_mask, y.loss_mask)
        for x, y in zip(a.segments, b.segments, strict=True)
    )
