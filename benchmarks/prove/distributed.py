"""`make prove-distributed`: many ranks train what one process trains, and survive what happens to ranks.

In: a folder, and how many random failures in a row (20). Out: claims. Ranks are real processes over gloo on this
machine; the run has a hole and a corrupted record, and steps in which a rank has nothing to train on.

usage: distributed.py FOLDER [FAILURES [SEED]]
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from claims import Claims

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))

from tests.train.launch import Ended, Launch, launch  # noqa: E402
from tests.train.runs import make_run, run_file  # noqa: E402
from tests.train.test_ranks import DEAD_WITHIN_S, MUON_TOLERANCE, TOLERANCE, furthest  # noqa: E402

from headrace.config import RunFolder  # noqa: E402
from headrace.order import split_over_ranks  # noqa: E402
from headrace.prepare.prepared import PreparedSet  # noqa: E402
from headrace.store.reader import StoreReader  # noqa: E402
from headrace.testing.tiny_target import save_tiny_target  # noqa: E402
from headrace.train.batches import Plan, plan_steps  # noqa: E402
from headrace.train.checkpoint import Checkpoint, load_checkpoint  # noqa: E402

EPOCHS = 16
LIMIT_S = DEAD_WITHIN_S + 20.0  # a stall of 20 s, or a death within 30 s
TRAIN: dict[str, Any] = {"epochs": EPOCHS, "eval_every": 32, "optimizer": "adamw"}
SAVED: dict[str, Any] = {**TRAIN, "save_seconds": 1e-6}
CAUSES = {
    "kill": "did not answer",
    "stop": "did not answer",
    "error": "StoreError",
    "save": "meeting point does not answer",
    "terminate": "",
    "stall": "",
}


def main(folder: Path, num_failures: int, seed: int) -> None:
    """Check everything."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = str(save_tiny_target(folder / "target"))
    made = make_run(folder / "made", folder / "target", changed={7: None})
    corrupt(made, row=3)
    claims = Claims("training on many ranks")
    whole = same(claims, folder, target)
    failures(claims, folder, target, whole, (num_failures, seed))
    script = PROJECT / "benchmarks" / "simulate" / "check.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "check")], stdout=subprocess.PIPE, text=True, check=True
    )
    for row in json.loads(done.stdout):
        claims.add(*row)
    claims.close()


def same(claims: Claims, folder: Path, target: str) -> Checkpoint:
    """One process against two and four, and a run that changes its number of ranks."""
    roots = {size: copy(folder, f"ranks-{size}") for size in (1, 2, 4)}
    by_muon = {size: copy(folder, f"muon-{size}") for size in (1, 2, 4)}
    moved = copy(folder, "moved")
    stops = [(2, 9), (1, 8)]
    plans = [Launch(size, str(root), target, TRAIN) for size, root in roots.items()]
    plans += [Launch(n, str(moved), target, TRAIN, {"rank": n - 1, "what": "terminate", "at": at}) for n, at in stops]
    plans += [Launch(size, str(root), target, {**TRAIN, "optimizer": "muon"}) for size, root in by_muon.items()]
    ended = launch([*plans, Launch(4, str(moved), target, TRAIN)])
    assert all(rank.status in (0, 143) for ranks in ended for rank in ranks), ended
    plan = plan_of(folder / "made", target)
    equal, idle = dealt(plan)
    claims.add(
        "global batches over 1, 2, 4 ranks", "every position once, in the same step", "equal" if equal else "not", equal
    )
    claims.add("steps in which one of 4 ranks has nothing", "some, else nothing is shown", str(idle), idle > 0)
    whole = last(roots[1])
    rows = sorted(whole.state.holes)
    claims.add(
        "a hole and a corrupted record are left out, and in the checkpoint", "rows 3, 7", str(rows), rows == [3, 7]
    )
    for name, root in (("2 ranks", roots[2]), ("4 ranks", roots[4]), ("2, then 1, then 4 ranks", moved)):
        found = last(root)
        far = furthest(whole, found)
        steps = _place(found) == _place(whole)
        told = f"{far:.1e} after {found.state.step} steps"
        claims.add(
            f"one process against {name}: largest difference of a weight",
            f"<= {TOLERANCE:.0e}",
            told,
            far <= TOLERANCE and steps,
        )
    for size in (2, 4):
        far = furthest(last(by_muon[1]), last(by_muon[size]))
        claims.add(
            f"one process against {size} ranks, by Muon, which gives noise the length of all else",
            f"<= {MUON_TOLERANCE:.0e}",
            f"{far:.1e}",
            far <= MUON_TOLERANCE,
        )
    return whole


def _place(one: Checkpoint) -> tuple[int, int, list[int]]:
    """Steps, tokens and rows of holes; a damaged record's reason names its file."""
    return one.state.step, one.state.num_tokens, sorted(one.state.holes)


def failures(claims: Claims, folder: Path, target: str, whole: Checkpoint, how: tuple[int, int]) -> None:
    """Random troubles in a row, each resumed by another number of ranks, then on to the end."""
    root, (number, seed) = copy(folder, "failures"), how
    chance = random.Random(seed)
    plans = [
        Launch(size := chance.choice((2, 4)), str(root), target, SAVED, trouble(chance, size)) for _ in range(number)
    ]
    ended = launch(plans, timeout_s=3600)
    hung = sum(rank.hung for ranks in ended for rank in ranks)
    slow = max(_survivors_s(plan, ranks) for plan, ranks in zip(plans, ended, strict=True))
    clear = sum(_clear(plan, ranks) for plan, ranks in zip(plans, ended, strict=True))
    kinds = ", ".join(f"{kind} {sum(p.trouble['what'] == kind for p in plans)}" for kind in CAUSES)
    claims.add(f"{number} random failures in a row ({kinds}): ranks that hang", "0", str(hung), not hung)
    claims.add("the last rank ends, after the start", f"< {LIMIT_S:.0f} s", f"{slow:.1f} s", slow < LIMIT_S)
    claims.add("starts in which every other rank names the cause", str(number), str(clear), clear == number)
    launch([Launch(2, str(root), target, TRAIN)])
    found = last(root)
    far = furthest(whole, found)
    claim = "after all failures, against the uninterrupted run of one process"
    told = f"{far:.1e} after {found.state.step} steps"
    same_end = found.state.step == whole.state.step
    claims.add(claim, f"<= {TOLERANCE:.0e}", told, far <= TOLERANCE and same_end)


def trouble(chance: random.Random, size: int) -> dict[str, Any]:
    """A random trouble within the first steps of a start."""
    what = chance.choice(list(CAUSES))
    rank = 0 if what == "save" else chance.randrange(size)
    then = {"then": 3} if what == "stall" else {}
    return {"rank": rank, "what": what, "at": chance.randint(1, 3), "seconds": 20.0, **then}


def _clear(plan: Launch, ranks: list[Ended]) -> bool:
    what, at = plan.trouble["what"], plan.trouble["rank"]
    if what in ("terminate", "stall"):  # a stall is waited for; then a signal ends the start
        return all(rank.status == 143 for rank in ranks)
    others = [rank for number, rank in enumerate(ranks) if number != at]
    hint = (CAUSES[what], "meeting point does not answer") if at == 0 else (CAUSES[what],)
    return all(rank.status == 10 and any(cause in rank.stderr for cause in hint) for rank in others)


def _survivors_s(plan: Launch, ranks: list[Ended]) -> float:
    return max(rank.seconds for number, rank in enumerate(ranks) if number != plan.trouble["rank"])


def corrupt(folder: RunFolder, row: int) -> None:
    """Flip one bit of a stored record."""
    reader = StoreReader(folder.states)
    entries = reader.entries()
    reader.close()
    found = entries[entries["row"] == row][0]
    path = sorted((folder.states / "shards").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[int(found["offset"]) + int(found["length"]) // 2] ^= 1
    path.write_bytes(content)


def plan_of(root: Path, target: str) -> Plan:
    """The plan of the run."""
    cfg = run_file(root, Path(target), **TRAIN)
    return plan_steps(PreparedSet.open(RunFolder(root).prepared), cfg.order, cfg.train)


def dealt(plan: Plan) -> tuple[bool, int]:
    """Whether every step's positions are dealt whole to 1, 2 and 4 ranks; steps in which one of 4 has nothing."""
    equal, idle = True, 0
    for epoch in range(plan.epochs):
        rows = plan.rows(epoch)
        for step in plan.steps(epoch):
            for size in (1, 2, 4):
                shares = split_over_ranks(step, rows, plan.lengths, size)
                equal &= sorted(place for share in shares for place in share) == list(range(*step))
            idle += any(not share for share in shares)
    return equal, idle


def copy(folder: Path, name: str) -> Path:
    """A run of its own."""
    return Path(shutil.copytree(folder / "made", folder / name))


def last(root: Path) -> Checkpoint:
    """The last checkpoint of a run."""
    return load_checkpoint(RunFolder(root).train() / "last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(n) for n in [*sys.argv[2:], "20", "0"][:2]))  # type: ignore[arg-type]
