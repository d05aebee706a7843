"""Which codecs a drafter trained on raw states does not notice: a screen without training.

In: a run folder with raw states and a drafter trained on them. Out: in OUT one line of `screen.jsonl` for each codec:
bytes a token, held-out τ (teacher-forced) and cross-entropy of that drafter when it reads what the codec gives back;
and `screen.svg`, τ against bytes. Codecs that are done are not done again.

A drafter that was trained on the codec's own coordinates can do better than this one: what the screen passes is safe,
what it fails may still be worth training.

usage: screen.py RUN_FOLDER OUT [--drafter FOLDER] [--codecs NAME …] [--heldout N]
"""

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.calibrate import Slice
from headrace.codec.base import Codec
from headrace.codec.fit import Moments, fit_latent, measure_moments
from headrace.codec.quantised import QuantisedCodec
from headrace.codec.registry import open_codec
from headrace.codec.spec import CodecSpec, short_spec
from headrace.config import RunFolder
from headrace.drafter.acceptance import teacher_forced
from headrace.drafter.anchors import draw_anchors, supervise
from headrace.drafter.loss import Weighting, block_loss
from headrace.drafter.model import Drafter
from headrace.drafter.stock import load_stock
from headrace.files import append_json_line, write_atomic
from headrace.prepare.model_files import load_config
from headrace.record import Sample
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import target_folder

ANCHORS = 16
FIT_TOKENS = 100_000
PLAIN = ["raw", "fp8", "rotated:8", "rotated:6", "rotated:5", "rotated:4", "rotated:3", "rotated:2"]
RANKS = (72, 144, 288, 576)
LATENTS = [f"{basis}:{r}x{b}" for basis in ("pca", "fc") for r in RANKS for b in ("8", "4", "3", "2")]
WATER = [f"{basis}-water:{r}x{b}" for basis in ("pca", "fc") for r in (288, 576) for b in ("4", "3")]


@dataclass(frozen=True, eq=False)
class Judge:
    """A drafter that reads raw taps, and the held-out samples with their states."""

    drafter: Drafter
    head: FrozenHead
    samples: list[Sample]
    states: list[torch.Tensor]

    def __call__(self, codec: Codec | None) -> dict[str, float]:
        """τ and cross-entropy through a codec; None reads nothing of the target: states of zero."""
        features = [self._through(own, codec) for own in self.states]
        tau = teacher_forced(self.drafter, features, self.samples, self.head).tau
        return {"tau": round(tau, 4), "ce": round(self._cross_entropy(features), 4)}

    def _through(self, own: torch.Tensor, codec: Codec | None) -> torch.Tensor:
        if codec is None:
            return torch.zeros_like(own).flatten(1)
        back = codec.reconstruct(codec.features(codec.encode(own), len(own)))
        return back.to(own.dtype).flatten(1)

    @torch.inference_mode()
    def _cross_entropy(self, features: list[torch.Tensor]) -> float:
        total = num = 0.0
        for sample, own in zip(self.samples, features, strict=True):
            anchors = draw_anchors(sample.loss_mask, ANCHORS, np.random.default_rng(sample.row))
            size = self.drafter.shape.block_size
            found = supervise(sample.input_ids, sample.loss_mask, anchors, size)
            ids = torch.from_numpy(sample.input_ids.astype(np.int64))
            at = torch.from_numpy(anchors)
            hidden = self.drafter.blocks(self.drafter.contexts([own]), [at], [ids[at]], self.head)
            supervised = torch.from_numpy(found.supervised)
            targets = torch.from_numpy(found.target_ids)
            loss = block_loss(hidden, targets, supervised, self.head, Weighting("decay"), 1.0)
            total, num = total + float(loss.ce_NB.sum()), num + float(supervised.sum())
        return total / num


def moments_of(fitted_on: Slice, path: Path) -> Moments:
    """Of the slice that every codec is fitted on; measured once, by the screen or by the training."""
    if not path.exists():
        out = io.BytesIO()
        torch.save(vars(measure_moments(fitted_on)), out)
        write_atomic(path, out.getvalue())
    return Moments(**torch.load(path, weights_only=True))


def codec_of(name: str, raw: CodecSpec, moments: Moments, fc_HW: torch.Tensor) -> Codec:
    """`raw`, `fp8`, `rotated:B`; `pca:RxB` or `fc:RxB` (rotated groups), `pca-water:RxB`, `fc-water:RxB`."""
    kind, _, size = name.partition(":")
    if kind not in ("pca", "fc", "pca-water", "fc-water"):
        return open_codec(short_spec(name, raw.num_taps, raw.hidden_size, raw.dtype))
    rank, bits = size.split("x")
    own = fc_HW if kind.startswith("fc") else None
    scheme = "water" if kind.endswith("water") else "rotate"
    spec, basis = fit_latent(moments, raw, int(rank), float(bits), own, scheme)  # type: ignore[arg-type]
    return QuantisedCodec(spec, basis)


def codecs(args: argparse.Namespace) -> Iterator[str]:
    """Names that are wanted and not done."""
    lines = args.out / "screen.jsonl"
    done = {json.loads(line)["codec"] for line in lines.read_text().splitlines()} if lines.exists() else set()
    yield from (name for name in args.codecs or ["none", *PLAIN, *LATENTS, *WATER] if name not in done)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """τ against bytes a token, a line for each family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    families: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        kind, _, size = line["codec"].partition(":")
        family = f"{kind}, {size.split('x')[1]} bits" if "x" in size else kind
        families.setdefault(family, []).append((line["bytes_per_token"], line["tau"]))
    for family, points in sorted(families.items()):
        if family == "none":
            axes.axhline(points[0][1], color="#777777", linewidth=0.8, linestyle=":", label="no states")
            continue
        style = {"marker": "o" if len(points) == 1 else ".", "linestyle": "--" if "water" in family else "-"}
        axes.plot(*zip(*sorted(points), strict=True), label=family, **style)  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.set_xlabel("bytes a token")
    axes.set_ylabel("held-out τ of the raw-trained drafter")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path)


def main() -> None:
    """Parse, screen what is missing, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--codecs", nargs="*")
    parser.add_argument("--heldout", type=int, default=40)
    parser.add_argument("--drafter", type=Path, help="trained on raw taps; else the one that the run exported")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    folder = RunFolder(args.run)
    wanted = list(codecs(args))
    if wanted:
        fitted_on, heldout = Slice(folder, False, FIT_TOKENS), Slice(folder, True, 10**9)
        raw = fitted_on.codec.spec
        moments = moments_of(fitted_on, args.out / "moments.pt")
        drafter = load_stock(args.drafter or folder.export).float().eval()
        model = target_folder(args.model)
        head = load_head(model, load_config(model)).to("cpu", torch.float32)
        rows = heldout.rows[: args.heldout]
        own = [states for _, (_, states) in zip(rows, heldout(), strict=False)]
        judge = Judge(drafter, head, [heldout.prepared.sample(row) for row in rows], own)
        for name in wanted:
            codec = None if name == "none" else codec_of(name, raw, moments, drafter.fc.weight.detach())
            size = 0.0 if codec is None else codec.spec.bytes_per_token()
            line = {"codec": name, "bytes_per_token": round(size, 1), **judge(codec)}
            line["ratio"] = round(raw.width * 2 / size, 2) if size else None
            append_json_line(args.out / "screen.jsonl", line)
            print(json.dumps(line), flush=True)
    draw([json.loads(x) for x in (args.out / "screen.jsonl").read_text().splitlines()], args.out / "screen.svg")


if __name__ == "__main__":
    main()
