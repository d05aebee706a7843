"""`make prove-trainer`: the training step beside speculators 0.9.0's, exactness, and a short paired training.

In: a run folder with the demo's prepared set (`make demo` leaves one), and the Python of an environment with
speculators 0.9.0. Out: claims. States with the target's last one, which the rival needs, are captured once into OUT.

usage: trainer.py RUN_FOLDER RIVAL_PYTHON OUT [--steps N] [--paired-steps N]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from claims import Claims

TRAINER = Path(__file__).parent.parent / "trainer"
TIMES = 3.0
MEMORY = 1.2
BELOW = 0.98
EXACT = {
    "float32 loss and gradients of the fast path against the plain one (1e-5)": ["tests/drafter/test_loss.py"],
    "packed samples against single ones, groups of anchors against all at once": [
        "tests/train/test_step.py",
        "tests/drafter/test_model.py",
    ],
    "resumed against uninterrupted, to the bit": ["tests/train/test_loop.py", "-k", "bits"],
}


def headrace(*arguments: str) -> None:
    """Run a command of ours."""
    subprocess.run([str(Path(sys.executable).with_name("headrace")), *arguments], check=True)


def exactness(claims: Claims) -> None:
    """Claim 2, as tests."""
    for claim, tests in EXACT.items():
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no answer"
        claims.add(claim, "tests pass", last, done.returncode == 0)


def speed(claims: Claims, args: argparse.Namespace) -> None:
    """Claim 1: alternating steps in one script."""
    path = args.out / "step.json"
    command = [sys.executable, str(TRAINER / "step.py"), str(args.run), args.rival_python]
    subprocess.run([*command, "--steps", str(args.steps), "--out", str(path)], check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    for one in found["results"]:
        ours, rival = one["ours"], one["rival"]
        claims.add(
            f"supervised positions a second at {one['anchors']} anchors, {found['dtype']}, {found['machine']}",
            f"at least {TIMES:g} times speculators'",
            f"{one['ratio']:.2f} times ({ours['positions_s']:.0f} and {rival['positions_s']:.0f}; first losses "
            f"{ours['first_loss']:.5f} and {rival['first_loss']:.5f})",
            one["ratio"] >= TIMES,
        )
    few, many = (one["ours"]["peak_bytes"] / 1e9 for one in found["results"])
    claims.add(
        "peak memory at 512 anchors against 64",
        f"at most {MEMORY:g} times",
        f"{many:.2f} and {few:.2f} GB",
        many <= MEMORY * few,
    )


def learning(claims: Claims, args: argparse.Namespace) -> None:
    """Claim 3, short: one seed."""
    states = args.out / "run"
    states.mkdir(exist_ok=True)
    if not (states / "prepared").exists():
        (states / "prepared").symlink_to((args.run / "prepared").resolve())
    changes = ["--set", f"run={states}", "--set", "capture.final_state=true", "--set", "capture.codec=raw"]
    headrace("capture", "examples/demo.yaml", *changes)
    command = [sys.executable, str(TRAINER / "paired.py"), str(states), args.rival_python, str(args.out / "paired")]
    subprocess.run([*command, "--seeds", "1", "--steps", str(args.paired_steps)], check=True)
    arms = json.loads((args.out / "paired" / "summary.json").read_text())["arms"]
    for arm, needed in (("headrace-adamw", BELOW), ("headrace", BELOW), ("headrace-long", 1.0)):
        own, rival = arms[arm], arms["speculators"]
        when = "equal time" if arm == "headrace-long" else "equal steps"
        claims.add(
            f"held-out τ of {arm} at {when}, one seed ({own['step']:.0f} and {rival['step']:.0f} steps)",
            f"{'more than' if needed == 1.0 else 'at least'} {needed:g} of speculators'",
            f"{own['tau']:.3f} and {rival['tau']:.3f}",
            own["tau"] > needed * rival["tau"],
        )


def main() -> None:
    """Parse, prove."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("rival_python")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--paired-steps", type=int, default=80)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    claims = Claims("the trainer")
    exactness(claims)
    speed(claims, args)
    learning(claims, args)
    claims.close()


if __name__ == "__main__":
    main()
