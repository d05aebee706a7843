"""`make prove-plan`: the published arithmetic, a plan beside reality on the demo, and what planning itself takes.

In: a run folder with the demo's prepared set (`make demo` leaves one; without it the demo is prepared and
answered here).
Out: claims. The prepared set is taken over into a folder of its own, planned with `--measure`, then captured and
trained for two epochs with no time limit, and `headrace plan --check` compares.

usage: plan.py RUN_FOLDER [--arithmetic]   (--arithmetic leaves the demo out)
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from claims import Claims

HEADRACE = str(Path(sys.executable).with_name("headrace"))
RUN_FILE = "examples/demo.yaml"
TAPS = "1,16,31,46,61"
QWEN = ["--hidden-size", "5120", "--blocks", "64", "--params", "27.3"]
DATA_SET = ["--samples", "913786", "--mean-tokens", "800", "--mean-answer", "500"]
TB, GIB = 1e12, 2**30


def plan(*words: str) -> dict[str, Any]:
    """`headrace plan ... --json`."""
    done = subprocess.run([HEADRACE, "plan", *words, "--json"], check=True, capture_output=True, text=True)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def near(claims: Claims, claim: str, needed: float, measured: float, unit: str, share: float = 0.005) -> None:
    """One published number beside the planner's."""
    shown = f"{measured:,.6g} {unit}"
    claims.add(claim, f"{needed:,.6g} {unit} within {share:.1%}", shown, abs(measured / needed - 1) <= share)


def arithmetic(claims: Claims) -> None:
    """Claim 1, through the command that people use."""
    raw = plan(*QWEN, *DATA_SET, "--taps", TAPS, "--codec", "raw", "--decode-rate", "120", "--link", "15 MB/s")
    figures = {name: figure["value"] for name, figure in raw["figures"].items()}
    total = raw["total_bytes"]
    near(claims, "Qwen3.6-27B, five taps", 51_200, raw["bytes_per_token"], "B/token", 0)
    near(claims, "913,786 samples x 800 tokens", 37.43, total / TB, "TB")
    near(claims, "the same", 34_858, total / GIB, "GiB")
    near(claims, "at 2x", 17_429, total / 2 / GIB, "GiB")
    near(claims, "at 1.5x", 23_239, total / 1.5 / GIB, "GiB")
    days = figures["decode_s"] / 86_400
    near(claims, "457 M answer tokens at 120 tokens/s", 44.1, days, "days")
    near(claims, "the same in hours", 1_058, days * 24, "h")
    four = plan(*QWEN, *DATA_SET, "--taps", TAPS, "--decode-rate", "120", "--streams", "4")
    near(claims, "with 4 streams, a quarter", days / 4, four["figures"]["decode_s"]["value"] / 86_400, "days")
    slow = plan(*QWEN, *DATA_SET, "--taps", TAPS, "--decode-rate", "50")
    near(claims, "at 50 tokens/s", 106, slow["figures"]["decode_s"]["value"] / 86_400, "days")
    near(claims, "15 MB/s carries", 293, figures["link_tokens_s"], "tokens/s")
    final = plan(*QWEN, *DATA_SET, "--taps", ",".join(f"after_block:{t}" for t in TAPS.split(",")) + ",final:pre_norm")
    near(claims, "with the last hidden state", 61_440, final["bytes_per_token"], "B/token", 0)
    six = "1,7,13,19,25,31"
    deepspec = plan(
        "--hidden-size", "2560", "--blocks", "36", "--params", "4", "--taps", six, "--samples", "1240000",
        "--mean-tokens", "1000",
    )  # fmt: skip
    near(claims, "DeepSpec's Qwen3-4B layout", 30_720, deepspec["bytes_per_token"], "B/token", 0)
    near(claims, "its 1.24 G tokens", 38.1, deepspec["total_bytes"] / TB, "TB")
    forge = ("--hidden-size", "2880", "--blocks", "36", "--params", "117", "--taps", "1,11,21,31", "--samples", "30000")
    full = plan(*forge, "--mean-tokens", "65536")
    near(claims, "SpecForge 426, a sample of 65,536 tokens", 1.51, full["bytes_per_sample"] / 1e9, "GB")
    mean_tokens = str(1.17e9 / full["bytes_per_token"])
    near(
        claims,
        "30,000 samples of the 1.17 GB it measured",
        35,
        plan(*forge, "--mean-tokens", mean_tokens)["total_bytes"] / TB,
        "TB",
    )
    moved = plan(*QWEN, "--samples", "406250", "--mean-tokens", "800", "--taps", TAPS)
    drafter_bytes = 2 * moved["figures"]["drafter_params"]["value"]
    moved_bytes = moved["figures"]["move_bytes"]["value"] - drafter_bytes + 2 * 1.73e9
    near(claims, "1.3 GB of tokens and a 1.73 G-parameter drafter", 4.76, moved_bytes / 1e9, "GB")


def itself(claims: Claims) -> None:
    """Claim 4: planning loads no torch and takes under a second."""
    words = ["plan", *QWEN, *DATA_SET, "--taps", TAPS, "--codec", "raw", "--json"]
    code = "import sys; from headrace.cli.main import app; sys.argv[0] = 'headrace'; app()"
    loud = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, *words], check=True, capture_output=True, text=True
    )
    loaded = [line.split("|")[-1].strip() for line in loud.stderr.splitlines() if line.startswith("import time:")]
    heavy = sorted({name.split(".")[0] for name in loaded} & {"torch", "transformers", "numpy.linalg._torch"})
    claims.add(
        f"python -X importtime, {len(loaded)} modules",
        "no torch",
        ", ".join(heavy) or "none",
        bool(loaded) and not heavy,
    )
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([HEADRACE, *words], check=True, capture_output=True)
        seconds.append(time.monotonic() - began)
    median = statistics.median(seconds)
    claims.add("headrace plan, median of 5 calls", "under 1 s", f"{median:.2f} s", median < 1)


def reality(claims: Claims, run: Path) -> None:
    """Claim 3: planned from measured rates, then done."""
    work = run.with_name(run.name + "-planned")
    shutil.rmtree(work, ignore_errors=True)
    settings = [f"--set=run={work}", "--set=train.max_seconds=null", "--set=train.epochs=2", "--set=floor=false"]
    # A latent that is yet to be fitted does not know how many tokens will escape: its bytes are an estimate.
    settings.append("--set=capture.codec=raw")
    if not (run / "prepared" / "manifest.json").exists():
        for stage in ("prepare", "regenerate"):
            subprocess.run([HEADRACE, stage, RUN_FILE, f"--set=run={run}"], check=True)
    shutil.copytree(run / "prepared", work / "prepared")
    subprocess.run([HEADRACE, "plan", RUN_FILE, *settings, "--measure"], check=True, stdout=subprocess.DEVNULL)
    for stage in ("capture", "train"):
        subprocess.run([HEADRACE, stage, RUN_FILE, *settings], check=True)
    done = subprocess.run(
        [HEADRACE, "plan", "--check", str(work), "--json"], check=True, capture_output=True, text=True
    )
    rows = json.loads(done.stdout)
    for row in rows:
        unit = "B" if row["name"].endswith("bytes") else "s"
        claims.add(
            f"the demo's {row['name']}, planned {row['planned']:,.4g} {unit}",
            f"within {row['tolerance']:.0%}",
            f"{row['real']:,.4g} {unit} ({row['ratio'] - 1:+.1%})",
            row["ok"],
        )
    names = {row["name"] for row in rows}
    claims.add("all four were compared", "bytes and times", ", ".join(sorted(names)), len(names) >= 4)


def main(run: Path, with_demo: bool) -> None:
    """Check everything."""
    claims = Claims("the planner")
    arithmetic(claims)
    itself(claims)
    if with_demo:
        reality(claims, run)
    claims.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--arithmetic" not in sys.argv[2:])
