"""`make prove-golden`: z-lab's own package agrees with the exported drafter of a real run.

In: a run folder with an exported drafter (`make demo` leaves one) and z-lab's package dflash 0.1.0. Out: claims. The
same folder is loaded by both; block logits and accepted lengths are compared on held-out prompts in float32, and
`headrace eval` of the folder is laid beside that of the trainer's checkpoint.

usage: golden.py RUN_FOLDER [NUM_PROMPTS]
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import dflash.model as zlab
import numpy as np
import torch
from claims import Claims

from headrace.config import RunFolder, TargetConfig
from headrace.drafter.model import Drafter, head_logits
from headrace.evaluate.decode import decode, decode_plain
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier
from headrace.export.zlab import load_zlab
from headrace.prepare.prepared import PreparedSet
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import TransformersTarget, load_target

LIMIT = 64
TOLERANCE = 1e-4
TAU_SHARE = 0.01  # the exported weights are rounded to bfloat16, the checkpoint's are not


@dataclass(frozen=True)
class Pair:
    """One exported folder, loaded by both, with its target."""

    target: TransformersTarget
    head: FrozenHead
    drafter: Drafter
    ours: DrafterProposer
    theirs: Any


def prompts(run: RunFolder, number: int) -> list[list[int]]:
    """Held-out prompts as ids, evenly spaced."""
    prepared = PreparedSet.open(run.prepared)
    rows = np.flatnonzero(prepared.heldout)
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, number).round().astype(int))]
    return [prepared.sample(int(row)).input_ids[: int(prepared.prompt_tokens[row])].tolist() for row in chosen]


@torch.inference_mode()
def logit_gap(pair: Pair, ids: list[int]) -> float:
    """Largest difference between the logits of every second block of one answer."""
    with LiveVerifier(pair.target, pair.ours.taps) as live:
        given = decode_plain(live, ids, LIMIT, pair.target.stop_ids, Sampling())
    assert given.states_TLH is not None
    features, drafter = given.states_TLH.flatten(1), pair.drafter
    shape = drafter.shape
    worst = 0.0
    for place in range(0, len(given.ids) - 1, 2):
        anchor, anchor_id = len(ids) + place, given.ids[place]
        block = torch.tensor([[anchor_id, *[shape.mask_token_id] * (shape.block_size - 1)]])
        hidden = pair.theirs(
            target_hidden=features[None, :anchor],
            noise_embedding=torch.nn.functional.embedding(block, pair.head.embedding_VH),
            position_ids=torch.arange(anchor + shape.block_size)[None],
        )
        expected = pair.theirs.compute_logits(hidden, pair.target.model.lm_head)[0, 1:]
        context = drafter.extend_context(drafter.empty_context(), features[:anchor], 0)
        found = head_logits(drafter.draft(context, anchor_id, anchor, pair.head), pair.head)
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def lengths(pair: Pair, ids: list[int]) -> tuple[list[int], list[int], bool]:
    """Tokens gained by each whole block, ours and theirs, and whether the answers are equal.

    Their last block before the limit is drafted at a shorter length than it was trained at; it is left out.
    """
    stats = zlab.dflash_generate(
        pair.theirs, pair.target.model, torch.tensor([ids]), LIMIT, sorted(pair.target.stop_ids), return_stats=True
    )
    with LiveVerifier(pair.target, pair.ours.taps) as live:
        found = decode(live, pair.ours, ids, LIMIT, pair.target.stop_ids, Sampling())
    whole = [n for n, k in zip(found.gained, found.offered, strict=True) if k == pair.ours.block_size - 1]
    same = found.ids == stats.output_ids[0, len(ids) :].tolist()
    return whole, stats.acceptance_lengths[: len(whole)], same


def tau(run: Path, number: int, exported: bool) -> float:
    """τ by `headrace eval`, of the checkpoint or of the exported folder."""
    words = [
        str(Path(sys.executable).with_name("headrace")),
        "eval",
        "examples/demo.yaml",
        f"--set=run={run}",
        "--json",
    ]
    words += [f"--set=evaluate.num_prompts={number}", *(["--drafter", str(run / "drafter")] if exported else [])]
    return float(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["tau"])


def main(run: Path, number: int) -> None:
    """Compare."""
    zlab._cuda_time = time.perf_counter  # it synchronises a GPU before it looks at the clock
    folder = RunFolder(run)
    claims = Claims("z-lab's package and the demo's drafter")
    target = load_target(TargetConfig(dtype="float32"))
    theirs = zlab.DFlashDraftModel.from_pretrained(
        folder.export, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    claims.add("the exported folder loads in z-lab's package", "no error", type(theirs).__name__, True)
    head = load_head(target.folder, target.model.config).to("cpu", torch.float32)
    drafter = load_zlab(folder.export)
    pair = Pair(target, head, drafter, DrafterProposer(drafter, head), theirs)
    chosen = prompts(folder, number)
    worst = max(logit_gap(pair, ids) for ids in chosen)
    claims.add(
        f"block logits of {len(chosen)} answers, every second block",
        f"within {TOLERANCE:g}",
        f"{worst:.2g}",
        worst <= TOLERANCE,
    )
    found = [lengths(pair, ids) for ids in chosen]
    ours, own = [n for f in found for n in f[0]], [n for f in found for n in f[1]]
    claims.add(
        f"accepted lengths of {len(ours)} whole blocks",
        "equal",
        f"{sum(a == b for a, b in zip(ours, own, strict=False))} equal",
        ours == own,
    )
    claims.add(
        "mean tokens a pass, so that lengths say something", "above 1.1", f"{np.mean(ours):.3f}", np.mean(ours) > 1.1
    )
    claims.add("answers", "equal", f"{sum(f[2] for f in found)} of {len(found)}", all(f[2] for f in found))
    trained, exported = tau(run, number, False), tau(run, number, True)
    claims.add(
        f"headrace eval of the exported folder, {number} prompts (checkpoint: τ {trained:.3f})",
        f"within {TAU_SHARE:.0%} of the checkpoint's τ",
        f"{exported:.3f} ({exported / trained - 1:+.2%})",
        abs(exported / trained - 1) <= TAU_SHARE,
    )
    claims.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12)
