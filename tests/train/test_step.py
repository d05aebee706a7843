from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from headrace.config import DrafterConfig, OrderConfig, TargetConfig, TrainConfig
from headrace.drafter.derive import derive_shape
from headrace.drafter.model import Drafter, head_logits
from headrace.drafter.vocabulary import sample_head
from headrace.errors import TrainError
from headrace.prepare.prepared import PreparedSet
from headrace.record import Sample, sample_id
from headrace.taps import parse_taps
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import load_target
from headrace.train.batches import Reader, Step, TrainSample, plan_steps, training_steps
from headrace.train.optimizer import build_optimizer
from headrace.train.step import _teacher, pack, take_step
from tests.train.runs import CODEC, TAPS, TRAIN, ListSource

CFG = TrainConfig(**TRAIN)


@pytest.fixture
def head(tiny_target: Path) -> FrozenHead:
    return load_head(tiny_target, AutoConfig.from_pretrained(tiny_target))


def new_drafter(tiny_target: Path, features: bool = True) -> Drafter:
    cfg = DrafterConfig(num_layers=1, block_size=4, mask_token_id=63, features=features)
    return Drafter(derive_shape(cfg, AutoConfig.from_pretrained(tiny_target), TAPS, CODEC.num_features, {}), seed=3)


def big_step(prepared: PreparedSet, cfg: TrainConfig, source: ListSource | None = None, features: bool = True) -> Step:
    plan = plan_steps(prepared, OrderConfig(window_samples=4), cfg)
    reader = Reader(prepared, (source or ListSource(prepared)) if features else None, CODEC if features else None)
    return next(training_steps(plan, reader, prepared, cfg, (0, 0), set()))


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_micro_batches_add_up_to_one_big_batch(
    prepared: PreparedSet, tiny_target: Path, head: FrozenHead, loss: str
) -> None:
    gradients, figures = [], []
    for micro_tokens in (150, 20):
        cfg = CFG.model_copy(update={"step_tokens": 150, "micro_tokens": micro_tokens, "loss": loss, "clip": 1e9})
        drafter = new_drafter(tiny_target)
        step = big_step(prepared, cfg)
        assert len(step.micro) == 1 if micro_tokens == 150 else len(step.micro) > 5
        found = take_step(drafter, build_optimizer(drafter, cfg), head, step, cfg)
        assert found is not None
        figures.append(found)
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
    whole, parts = figures
    assert whole.num_supervised == parts.num_supervised
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.ce == pytest.approx(whole.ce, rel=1e-5)
    assert parts.hit_rate == whole.hit_rate
    for name, expected in gradients[0].items():
        found_grad = gradients[1][name]
        assert expected is not None
        assert found_grad is not None, name
        assert torch.allclose(found_grad, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())), name


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("features", [True, False])
def test_groups_of_blocks_add_up_to_all_at_once(
    prepared: PreparedSet, tiny_target: Path, head: FrozenHead, size: int, features: bool
) -> None:
    gradients, figures = [], []
    for group_blocks in (1000, size):
        cfg = CFG.model_copy(update={"step_tokens": 150, "micro_tokens": 60, "group_blocks": group_blocks, "clip": 1e9})
        drafter = new_drafter(tiny_target, features)
        step = big_step(prepared, cfg, features=features)
        assert max(sum(len(s.anchors_A) for s in batch) for batch in step.micro) > 5
        figures.append(take_step(drafter, build_optimizer(drafter, cfg), head, step, cfg))
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
    whole, parts = figures
    assert whole is not None
    assert parts is not None
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.num_supervised == whole.num_supervised
    assert gradients[0]["layers.0.self_attn.k_proj.weight"] is not None
    for name, expected in gradients[0].items():
        found_grad = gradients[1][name]
        if expected is None:
            assert found_grad is None, name
            continue
        assert found_grad is not None, name
        assert torch.allclose(found_grad, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())), name


@pytest.mark.parametrize("objective", ["kl", "tv"])
def test_a_slot_is_drawn_to_what_the_target_says_there(
    tiny_target: Path, head: FrozenHead, objective: Literal["kl", "tv"]
) -> None:
    target = load_target(TargetConfig(model=str(tiny_target), dtype="float32", device="cpu"))
    ids = np.random.default_rng(0).integers(3, 60, 14).astype(np.int32)
    columns = target.states([ids], parse_taps([*TAPS, "final:pre_norm"], target.spec.num_blocks), 14)[0].flatten(1)
    mask = (np.arange(14) >= 4).astype(np.uint8)
    sample = Sample(0, sample_id(ids, mask), ids, mask)
    own = TrainSample(sample, columns[:, :64], np.array([4, 7, 11]), columns[:, 64:])
    batch = pack([own], 4, torch.device("cpu"))
    teacher = _teacher(batch, batch.anchors, head, CFG.model_copy(update={"objective": objective}))
    logits = target.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    for block, anchor in enumerate(own.anchors_A.tolist()):
        for slot in range(1, 4):
            if batch.supervised_NB[block, slot]:
                said = head_logits(teacher.hidden_NBH[block, slot], head)
                torch.testing.assert_close(said, logits[anchor + slot - 1], rtol=1e-4, atol=1e-4)
    cfg = CFG.model_copy(update={"objective": objective, "optimizer": "adamw", "lr": 0.01})
    drafter = new_drafter(tiny_target)
    optimizer = build_optimizer(drafter, cfg)
    losses = [take_step(drafter, optimizer, head, Step(0, 0, 1, [[own]]), cfg) for _ in range(15)]
    assert losses[-1].loss < 0.8 * losses[0].loss  # type: ignore[union-attr]


def test_a_step_lowers_its_own_loss(prepared: PreparedSet, tiny_target: Path, head: FrozenHead) -> None:
    drafter, step = new_drafter(tiny_target), big_step(prepared, CFG)
    optimizer = build_optimizer(drafter, CFG)
    losses = [take_step(drafter, optimizer, head, step, CFG) for _ in range(5)]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1].ce < losses[0].ce


def test_a_loss_that_is_not_finite_names_its_micro_batch(
    prepared: PreparedSet, tiny_target: Path, head: FrozenHead
) -> None:
    drafter, step = new_drafter(tiny_target), big_step(prepared, CFG)
    bad = step.micro[-1][0]
    bad.features_TF[:] = float("nan")
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(TrainError, match=bad.sample.id.hex()) as caught:
        take_step(drafter, build_optimizer(drafter, CFG), head, step, CFG)
    assert step.micro[0][0].sample.id.hex() not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_a_gradient_that_is_not_finite_names_the_step_and_changes_nothing(
    prepared: PreparedSet, tiny_target: Path, head: FrozenHead
) -> None:
    drafter, step = new_drafter(tiny_target), big_step(prepared, CFG)
    drafter.fc.weight.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(TrainError, match="finite gradient") as caught:
        take_step(drafter, build_optimizer(drafter, CFG), head, step, CFG)
    assert all(s.name in str(caught.value) for batch in step.micro for s in batch)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_a_step_of_holes_changes_nothing(prepared: PreparedSet, tiny_target: Path, head: FrozenHead) -> None:
    drafter = new_drafter(tiny_target)
    step = big_step(prepared, CFG, ListSource(prepared, holes=range(14)))
    assert step.micro == []
    assert take_step(drafter, build_optimizer(drafter, CFG), head, step, CFG) is None


def test_a_step_that_looks_at_a_sample_of_the_vocabulary_learns_and_is_repeatable(
    prepared: PreparedSet, tiny_target: Path, head: FrozenHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.train.step.sample_head", lambda *a: sample_head(a[0], a[1], 40, a[3]))
    weights = []
    for sampled in (None, 256, 256):
        cfg = CFG.model_copy(update={"sampled_vocabulary": sampled})
        drafter, step = new_drafter(tiny_target), big_step(prepared, cfg)
        optimizer = build_optimizer(drafter, cfg)
        found = [take_step(drafter, optimizer, head, step, cfg) for _ in range(6)]
        assert found[0] is not None
        assert found[-1] is not None
        assert found[-1].loss < found[0].loss
        weights.append(drafter.fc.weight.detach())
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
