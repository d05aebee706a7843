"""Real processes over gloo: one against two and four, resumed on other numbers of ranks, and the troubles of a rank."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import RunFolder
from headrace.errors import TrainError
from headrace.testing.tiny_target import save_tiny_target
from headrace.train.checkpoint import Checkpoint, load_checkpoint
from headrace.train.ranks import ALONE, _owners, joined
from tests.train.launch import Ended, Launch, launch
from tests.train.runs import make_run

# Sums of float32 gradients in another order, through AdamW over 8 steps: measured at most 2e-7 of weights up to 1.
TOLERANCE = 2e-6
MUON_TOLERANCE = 1e-4  # it gives every direction of a gradient the same length, those of rounding too
DEAD_WITHIN_S = 30.0
Copy = Callable[[str], str]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    base = tmp_path_factory.mktemp("ranks")
    save_tiny_target(base / "target")
    make_run(base / "made", base / "target", changed={7: None})
    return lambda name: str(shutil.copytree(base / "made", base / name))


@pytest.fixture(scope="module")
def done(copy: Copy) -> dict[str, tuple[Path, list[Ended]]]:
    """Every launch of this module, in one host."""
    first = copy("one")
    again, target = (str(Path(first).parent / name) for name in ("resumed", "target"))
    ema, own = {"ema": 0.5, "optimizer": "adamw"}, {"optimizer": "adamw"}
    kill = {"rank": 1, "what": "kill", "at": 4}
    stall = {"rank": 1, "what": "stall", "at": 6, "seconds": 8.0}
    plans = {
        "one": Launch(1, first, target, ema),
        "two": Launch(2, copy("two"), target, ema),
        "four": Launch(4, copy("four"), target, ema),
        "resumed on two": Launch(2, copy("resumed"), target, ema, {"rank": 1, "what": "terminate", "at": 3}),
        "resumed on one": Launch(1, again, target, ema, {"rank": 0, "what": "terminate", "at": 2}),
        "resumed on four": Launch(4, again, target, ema),
        "floor of one": Launch(1, copy("floor-1"), target, own, features=False),
        "floor of two": Launch(2, copy("floor-2"), target, own, features=False),
        "one by muon": Launch(1, copy("muon-1"), target, {"optimizer": "muon"}),
        "two by muon": Launch(2, copy("muon-2"), target, {"optimizer": "muon"}),
        "killed": Launch(2, copy("killed"), target, {"save_seconds": 1e-6}, kill),
        "first killed": Launch(2, copy("first"), target, {}, {"rank": 0, "what": "kill", "at": 3}),
        "stopped": Launch(2, copy("stopped"), target, {}, {"rank": 1, "what": "stop", "at": 3}),
        "first stopped": Launch(2, copy("first-stopped"), target, {}, {"rank": 0, "what": "stop", "at": 3}),
        "error": Launch(2, copy("error"), target, {}, {"rank": 1, "what": "error", "at": 6}),
        "stalled": Launch(2, copy("stalled"), target, ema, stall),
    }  # fmt: skip
    return {
        name: (Path(plan.root), ended)
        for (name, plan), ended in zip(plans.items(), launch(list(plans.values())), strict=True)
    }


def last(root: Path, features: bool = True) -> Checkpoint:
    return load_checkpoint(RunFolder(root).train(features) / "last")


def furthest(one: Checkpoint, other: Checkpoint) -> float:
    """The largest difference of weights and averages."""
    pairs = [
        (own, mine[name])
        for mine, theirs in ((one.weights, other.weights), (one.average, other.average))
        for name, own in theirs.items()
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


Done = dict[str, tuple[Path, list[Ended]]]


@pytest.mark.parametrize("name", ["two", "four"])
def test_moments_are_divided_over_ranks_and_saved_together(done: Done, name: str) -> None:
    whole, parts = last(done["one"][0]).moments, last(done[name][0]).moments
    assert parts.keys() == whole.keys()
    assert all(torch.allclose(parts[key], whole[key], rtol=1e-3, atol=1e-6) for key in whole)


@given(sizes=st.lists(st.integers(1, 50), min_size=4, max_size=20), num_ranks=st.integers(1, 4))
def test_every_rank_owns_a_fair_part(sizes: list[int], num_ranks: int) -> None:
    owners = _owners([torch.nn.Parameter(torch.zeros(size)) for size in sizes], num_ranks)
    held = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert min(held) > 0
    assert max(held) - min(held) <= max(sizes)


@pytest.mark.parametrize("name", ["two", "four", "resumed on four", "stalled"])
def test_ranks_train_the_drafter_that_one_process_trains(done: Done, name: str) -> None:
    assert [rank.status for rank in done[name][1]] == [0] * len(done[name][1]), done[name][1]
    whole, found = last(done["one"][0]), last(done[name][0])
    assert found.average
    assert furthest(whole, found) <= TOLERANCE
    assert (whole.state.step, whole.state.num_tokens, whole.state.holes) == (
        found.state.step,
        found.state.num_tokens,
        found.state.holes,
    )


def test_muon_gives_noise_the_length_of_all_else_and_still_differs_by_little(done: Done) -> None:
    assert [rank.status for name in ("one by muon", "two by muon") for rank in done[name][1]] == [0] * 3
    whole, found = last(done["one by muon"][0]), last(done["two by muon"][0])
    assert furthest(whole, found) <= MUON_TOLERANCE
    assert whole.state.step == found.state.step


def test_stops_on_other_numbers_of_ranks_were_real(done: Done) -> None:
    assert [rank.status for rank in done["resumed on two"][1]] == [143, 143]
    assert [rank.status for rank in done["resumed on one"][1]] == [143]


def test_the_floor_keeps_what_has_no_gradient(done: Done) -> None:
    whole, found = last(done["floor of one"][0], False), last(done["floor of two"][0], False)
    assert furthest(whole, found) <= TOLERANCE
    assert torch.equal(whole.weights["fc.weight"], found.weights["fc.weight"])
    assert not any(name.startswith("fc.") for name in found.moments)


@pytest.mark.parametrize(
    ("name", "alive", "cause"),
    [
        ("killed", 0, "rank 1 did not answer"),
        ("first killed", 1, "meeting point does not answer"),
        ("stopped", 0, "rank 1 did not answer"),
        ("first stopped", 1, "meeting point does not answer"),
        ("error", 0, "rank 1 ended: StoreError"),
    ],
)
def test_a_dead_rank_ends_the_others_with_the_cause(done: Done, name: str, alive: int, cause: str) -> None:
    ended, dead = done[name][1][alive], done[name][1][1 - alive]
    assert not ended.hung
    assert ended.status == TrainError.exit_code, ended.stderr
    assert cause in ended.stderr
    died_s = dead.seconds if name != "stopped" else 0.0  # a stopped rank is killed when the other has ended
    assert ended.seconds - died_s < DEAD_WITHIN_S


def test_what_a_killed_rank_left_is_whole(done: Done) -> None:
    assert last(done["killed"][0]).state.step == 3


def test_one_process_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(torch.device("cpu")) as ranks:
        assert ranks is ALONE
    assert ranks.sum([1.0, 2.5]) == [1.0, 2.5]
    assert ranks.gather("x") == ["x"]


def test_an_environment_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("2", "one"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(TrainError, match="RANK"), joined(torch.device("cpu")):
            pass
