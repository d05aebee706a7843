"""A tiny target with a drafter that learnt from its answers, made once for the tests of evaluate and export."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.config import TargetConfig
from headrace.drafter.anchors import supervise
from headrace.drafter.loss import Weighting, block_loss
from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.evaluate.decode import Plain, decode_plain
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.taps import Tap
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import TransformersTarget, load_target
from headrace.testing.tiny_target import HIDDEN_SIZE, NUM_BLOCKS, VOCAB_SIZE, save_tiny_target
from headrace.token_rule import eligible_anchors

TAPS = (Tap("after_block", 1), Tap("after_block", 3))
BLOCK = 5
LIMIT = 24


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and its drafter, in float32, with prompts for both."""

    target: TransformersTarget
    head: FrozenHead
    drafter: Drafter
    prompts: list[list[int]]


def prompts(num: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, VOCAB_SIZE, int(rng.integers(3, 9))).tolist() for _ in range(num)]


def plain(target: TransformersTarget, ids: list[int], taps: tuple[Tap, ...] = TAPS, limit: int = LIMIT) -> Plain:
    with LiveVerifier(target, taps) as live:
        return decode_plain(live, ids, limit, target.stop_ids, Sampling())


def shape() -> DrafterShape:
    return DrafterShape(
        hidden_size=HIDDEN_SIZE, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
        vocab_size=VOCAB_SIZE, block_size=BLOCK, mask_token_id=5, taps=tuple(str(t) for t in TAPS),
        num_target_layers=NUM_BLOCKS, num_features=len(TAPS) * HIDDEN_SIZE, features=True,
    )  # fmt: skip


def taught(
    target: TransformersTarget, head: FrozenHead, num_steps: int, of: DrafterShape | None = None, lr: float = 3e-3
) -> Drafter:
    """A drafter trained for a moment on the target's own answers; its feature scale is not 1."""
    drafter = Drafter(of or shape(), seed=0)
    drafter.feature_scale.copy_(torch.linspace(0.05, 0.2, len(drafter.feature_scale)))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    answers = [plain(target, ids) for ids in prompts(24, seed=1)]
    answers = [a for a in answers if len(a.ids) > 2]
    ids = [np.array([*a.prompt_ids, *a.ids], dtype=np.int32) for a in answers]
    masks = [(np.arange(len(i)) >= len(a.prompt_ids)).astype(np.uint8) for i, a in zip(ids, answers, strict=True)]
    anchors = [eligible_anchors(m) for m in masks]
    lined_up = [supervise(i, m, a, BLOCK) for i, m, a in zip(ids, masks, anchors, strict=True)]
    wanted = torch.from_numpy(np.concatenate([s.target_ids for s in lined_up]))
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in lined_up]))
    features = [torch.cat((a.states_TLH.flatten(1), torch.zeros(1, drafter.shape.num_features))) for a in answers]
    places, words = [torch.from_numpy(a) for a in anchors], [torch.from_numpy(i.astype(np.int64)) for i in ids]
    for _ in range(num_steps):
        hidden = drafter(features, places, words, head)
        loss = block_loss(hidden, wanted, supervised, head, Weighting(), float(supervised.sum())).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


_MADE: list[Pair] = []


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Made once, although two folders of tests ask for it."""
    if not _MADE:
        _MADE.append(make_pair(tmp_path_factory))
    return _MADE[0]


def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = save_tiny_target(tmp_path_factory.mktemp("tiny") / "model", tied=False)
    target = load_target(TargetConfig(model=str(folder), dtype="float32"))
    head = load_head(folder, target.model.config).to("cpu", torch.float32)
    return Pair(target, head, taught(target, head, 70), prompts(24, seed=1)[:10])
