"""The evaluation of a run: τ beside its floors, and the proof that answers are the target's own.

In: held-out prompts of the prepared set, a target, a drafter. Out: `prompts.jsonl`, one line a prompt as it is done, so
that an interrupted evaluation goes on; and `results.json`. The trained drafter decodes for real beside plain decoding.
Prompt lookup, the drafter without features and the untrained one are counted by replaying the plain greedy answer:
which drafted tokens stand depends on that answer alone, so the count is the one that decoding would give.
The checkpoint is the last one: the best was chosen by its τ on these very prompts, and would flatter itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import RunFile, RunFolder
from headrace.drafter.acceptance import AcceptanceCount
from headrace.drafter.draft_vocabulary import draft_ids, reduced
from headrace.drafter.model import Drafter
from headrace.drafter.shape import DrafterShape
from headrace.drafter.stock import WEIGHTS, load_stock
from headrace.errors import ConfigError, EvaluateError
from headrace.evaluate.decode import Decoded, Plain, Proposer, decode, decode_plain
from headrace.evaluate.identity import compare
from headrace.evaluate.interval import PerPrompt, margin_interval, tau_interval
from headrace.evaluate.lookup import PromptLookup
from headrace.evaluate.propose import DrafterProposer
from headrace.evaluate.sampling import Sampling
from headrace.evaluate.verify import LiveVerifier, ReplayVerifier
from headrace.files import Stage, write_json
from headrace.kinds import EvaluateConfig
from headrace.prepare.model_files import max_positions
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.record import digest
from headrace.target.head import FrozenHead, load_head
from headrace.target.transformers_target import TransformersTarget
from headrace.train.checkpoint import LAST, read_state
from headrace.train.load import as_served, check_belongs, load_codec, load_drafter, unfinished

FLOORS = ("untrained", "no_features", "prompt_lookup")
Line = dict[str, Any]


def evaluate(
    cfg: RunFile, folder: RunFolder, target: TransformersTarget, progress: Progress, drafter: Path | None = None
) -> dict[str, Any]:
    """Evaluate the run's last checkpoint, or with `drafter` an exported folder.

    Returns: the figures of `eval/results.json`, or of `eval/results-export.json` for an exported folder.
    Raises: EvaluateError when the run has no held-out prompt, or its drafter belongs to another target.
    """
    where = folder.evaluation if drafter is None else folder.evaluation.with_name("eval-export")
    prepared = PreparedSet.open(folder.prepared)
    if drafter is None and (how_far := unfinished(folder.train())) is not None:
        progress.note(f"eval: the training has not ended, it {how_far}")
    proposers = _proposers(cfg, folder, target, prepared, drafter, _floor(cfg, folder, progress))
    work = _Evaluation(cfg.evaluate, prepared, target, proposers, cfg.train.seed)
    path = where / "prompts.jsonl"
    stage = begun_stage(where, work.identity(), progress, (path.name,))
    done = {line["row"]: line for line in _read(path)}
    rows = work.rows()
    work.check_positions(rows)
    progress.start("eval", len(rows), "prompts", len(done))
    work.warm_up()
    with open(path, "a", encoding="utf-8") as out:
        for row in rows:
            if row not in done:
                done[row] = work.prompt(row)
                out.write(json.dumps(done[row]) + "\n")
                out.flush()
            counted = _count(done.values(), "drafter")
            progress.advance(len(done), tau=counted.tau)
    progress.end()
    results = summarise([done[row] for row in rows], cfg.evaluate)
    results["drafter"] = proposers.weights["drafter"]
    write_json(folder.evaluation / ("results.json" if drafter is None else "results-export.json"), results)
    stage.finish(results)
    _tell(results, progress)
    return results


@dataclass(frozen=True)
class _Proposers:
    """What is compared; floors that do not exist (yet) are left out."""

    drafter: DrafterProposer
    floors: dict[str, Proposer]
    weights: dict[str, str]


def _proposers(
    cfg: RunFile,
    folder: RunFolder,
    target: TransformersTarget,
    prepared: PreparedSet,
    exported: Path | None,
    floor: Path | None,
) -> _Proposers:
    head = load_head(target.folder, target.model.config).to(target.model.device, target.model.dtype)
    trained = _load(folder.train() / LAST, target, prepared) if exported is None else load_stock(exported)
    check_shape(trained.shape, target)
    weights = {"drafter": _digest((folder.train() / LAST if exported is None else exported) / WEIGHTS)}
    own = proposer_of(trained, target, head)
    untrained = Drafter(trained.shape, cfg.train.seed)
    untrained.feature_scale.copy_(trained.feature_scale)
    untrained.d2t = trained.d2t
    floors: dict[str, Proposer] = {
        "untrained": proposer_of(untrained, target, head),
        "prompt_lookup": PromptLookup(cfg.evaluate.lookup_ngram, own.block_size),
    }
    if floor is not None:
        floors["no_features"] = proposer_of(_load(floor, target, prepared), target, head)
        weights["no_features"] = _digest(floor / WEIGHTS)
    return _Proposers(own, floors, weights)


def proposer_of(drafter: Drafter, target: TransformersTarget, head: FrozenHead) -> DrafterProposer:
    """A drafter where the target is, in its dtype."""
    own = reduced(head, draft_ids(drafter))
    return DrafterProposer(drafter.to(target.model.device, target.model.dtype), own)


def _load(checkpoint: Path, target: TransformersTarget, prepared: PreparedSet) -> Drafter:
    """A drafter from a checkpoint, reading raw taps. Raises: TrainError when it belongs to another target or set."""
    drafter, extras = load_drafter(checkpoint)
    check_belongs(extras, target.spec.weights_hash, prepared.fingerprint)
    return as_served(drafter, load_codec(checkpoint, extras)) if drafter.shape.features else drafter


def _floor(cfg: RunFile, folder: RunFolder, progress: Progress) -> Path | None:
    """The checkpoint of the no-features floor, if the run has one that was trained as long as the drafter."""
    floor, own = folder.train(False), folder.train() / LAST
    if not cfg.floor or not (floor / LAST).exists() or not own.exists():
        return None
    steps = [read_state(path).step for path in (floor / LAST, own)]
    if steps[0] != steps[1]:
        progress.note(
            f"eval: the no-features floor is left out: trained for {steps[0]} steps, the drafter for {steps[1]}"
        )
        return None
    return floor / LAST


def check_shape(shape: DrafterShape, target: TransformersTarget) -> None:
    """A stock folder does not say whose drafter it is; its sizes at least must be the target's."""
    own = (shape.num_target_layers, shape.hidden_size, shape.vocab_size)
    found = (target.spec.num_blocks, target.spec.hidden_size, target.spec.vocab_size)
    if own != found:
        raise EvaluateError(
            f"a target of {own[0]} blocks, hidden {own[1]}, vocabulary {own[2]}",
            f"{found[0]} blocks, hidden {found[1]}, vocabulary {found[2]}",
            "set target.model to the drafter's own target",
        )


def _digest(weights: Path) -> str:
    return digest(weights.read_bytes()).hex()


def heldout_rows(prepared: PreparedSet, num_prompts: int | None) -> list[int]:
    """Held-out rows, evenly spaced if fewer are wanted. Raises: EvaluateError when there are none."""
    rows = np.flatnonzero(prepared.heldout)
    if not len(rows):
        raise EvaluateError("held-out prompts", "none", "set prepare.heldout_fraction or prepare.heldout_data")
    wanted = min(num_prompts or len(rows), len(rows))
    places = np.linspace(0, len(rows) - 1, wanted).round().astype(int)
    return [int(row) for row in rows[np.unique(places)]]


@dataclass
class _Evaluation:
    """One prompt after the other."""

    cfg: EvaluateConfig
    prepared: PreparedSet
    target: TransformersTarget
    proposers: _Proposers
    train_seed: int

    def warm_up(self) -> None:
        """Run a few tokens, so that what a first pass costs once is not put down to plain decoding."""
        ids = self.prepared.sample(self.rows()[0]).input_ids[:2].tolist()
        with LiveVerifier(self.target, self.proposers.drafter.taps) as live:
            decode_plain(live, ids, 4, (), Sampling())

    def rows(self) -> list[int]:
        """The rows that are evaluated. Raises: EvaluateError as heldout_rows."""
        return heldout_rows(self.prepared, self.cfg.num_prompts)

    def check_positions(self, rows: Iterable[int]) -> None:
        """Raise EvaluateError where a prompt and its answer, a block drafted beyond it, do not fit the target."""
        most = max_positions(self.target.folder)
        longest = max(int(self.prepared.prompt_tokens[row]) for row in rows)
        needed = longest + self.cfg.max_new_tokens + self.proposers.drafter.block_size
        if most is not None and needed > most:
            raise EvaluateError(
                f"prompts and answers within the target's {most} positions",
                f"{longest} tokens of prompt, {self.cfg.max_new_tokens} of answer, and a block",
                "lower evaluate.max_new_tokens, or prepare shorter prompts",
            )

    def identity(self) -> dict[str, Any]:
        """What decides the figures."""
        spec = asdict(self.target.spec)
        kept = {key: spec[key] for key in ("weights_hash", "dtype", "engine_version")}
        return {
            "evaluate": self.cfg.model_dump(mode="json"),
            "prepared": self.prepared.fingerprint,
            "target": kept,
            "drafters": self.proposers.weights,
            "untrained_seed": self.train_seed,
        }

    def prompt(self, row: int) -> Line:
        """Decode one prompt plainly and speculatively, and count the floors on the plain answer."""
        sample = self.prepared.sample(row)
        ids = sample.input_ids[: int(self.prepared.prompt_tokens[row])].tolist()
        plain, own = self._plain(ids, row), self._speculative(ids, row)
        line: Line = {"row": row, "source": sample.source, "tokens": len(own.ids), "drafter": _passes(own)}
        line["seconds"] = {"plain": round(plain.seconds, 4), "speculative": round(own.seconds, 4)}
        line["plain_tokens"] = len(plain.ids)
        if self.cfg.temperature == 0:
            line["identity"] = asdict(compare(plain.ids, own.ids, plain.gaps, self.cfg.tie_gap))
            line["floors"] = {name: _passes(self._replayed(plain, p)) for name, p in self.proposers.floors.items()}
        return line

    def _sampling(self, row: int, purpose: int) -> Sampling:
        rng = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + row * 2 + purpose)
        return Sampling(self.cfg.temperature, 1.0, rng)

    def _plain(self, ids: list[int], row: int) -> Plain:
        with LiveVerifier(self.target, self.proposers.drafter.taps) as live:
            return decode_plain(live, ids, self.cfg.max_new_tokens, self.target.stop_ids, self._sampling(row, 0))

    def _speculative(self, ids: list[int], row: int) -> Decoded:
        own = self.proposers.drafter
        with LiveVerifier(self.target, own.taps) as live:
            return decode(live, own, ids, self.cfg.max_new_tokens, self.target.stop_ids, self._sampling(row, 1))

    def _replayed(self, plain: Plain, proposer: Proposer) -> Decoded:
        replay = ReplayVerifier(plain)
        stops, greedy = self.target.stop_ids, Sampling()
        return decode(replay, proposer, plain.prompt_ids, self.cfg.max_new_tokens, stops, greedy)


def _passes(decoded: Decoded) -> dict[str, list[int]]:
    return {"gained": decoded.gained, "offered": decoded.offered}


def summarise(lines: list[Line], cfg: EvaluateConfig) -> dict[str, Any]:
    """The figures of `results.json` from the lines of `prompts.jsonl`."""
    own = _count(lines, "drafter")
    interval = tau_interval(_per_prompt(own), cfg.seed)
    results: dict[str, Any] = {"tau": own.tau, "tau_interval": [round(interval.low, 4), round(interval.high, 4)]}
    for name in FLOORS:
        present = all(name in line.get("floors", {}) for line in lines)
        count = _count([line["floors"] for line in lines], name) if present else None
        results[f"tau_{name}"] = None if count is None else count.tau
        margin = None if count is None else margin_interval(_per_prompt(own), _per_prompt(count), cfg.seed)
        results[f"margin_{name}"] = None if margin is None else margin.to_json()
    verdicts = [line["identity"]["verdict"] for line in lines if "identity" in line]
    return {
        **results,
        "greedy_identical": "differs" not in verdicts if verdicts else None,
        "num_ties": verdicts.count("tie"),
        "num_prompts": len(lines),
        "num_tokens": sum(line["tokens"] for line in lines),
        "per_task": _per_task(lines),
        "per_slot": [round(share, 4) for share in own.per_slot()],
        "seconds_plain": round(sum(line["seconds"]["plain"] for line in lines), 2),
        "seconds_speculative": round(sum(line["seconds"]["speculative"] for line in lines), 2),
    }


def _count(lines: Iterable[Mapping[str, Any]], name: str) -> AcceptanceCount:
    count = AcceptanceCount()
    for line in lines:
        count.add(line[name]["gained"], line[name]["offered"])
    return count


def _per_prompt(count: AcceptanceCount) -> PerPrompt:
    return PerPrompt([sum(g) for g in count.gained], [len(g) for g in count.gained])


def _per_task(lines: list[Line]) -> dict[str, dict[str, float]]:
    tasks: dict[str, list[Line]] = {}
    for line in lines:
        tasks.setdefault(line["source"], []).append(line)
    return {
        name: {"tau": round(_count(own, "drafter").tau, 4), "num_prompts": len(own)}
        for name, own in sorted(tasks.items())
    }


def begun_stage(where: Path, identity: Mapping[str, Any], progress: Progress, files: Sequence[str]) -> Stage:
    """Go on with an evaluation of the same things; begin anew when anything differs, for nothing dear is lost.

    Args: files: of an evaluation whose stage.json was lost, or that is made anew; they are removed.
    """
    stage = Stage(where, "eval", identity)
    try:
        state = stage.state()
    except ConfigError as exc:
        progress.note(f"eval: made anew, since {exc.args[0]} is not so ({exc.args[1]})")
        state = "new"
    if state == "new":
        for name in files:
            (where / name).unlink(missing_ok=True)
        stage.begin()
    return stage


def _read(path: Path) -> list[Line]:
    """Whole lines; a torn last one is cut away."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def _tell(results: Mapping[str, Any], progress: Progress) -> None:
    low, high = results["tau_interval"]
    progress.note(f"eval: τ {results['tau']:.3f} ({low:.3f} to {high:.3f}) on {results['num_prompts']} prompts")
    for name in FLOORS:
        if (margin := results[f"margin_{name}"]) is not None:
            progress.note(
                f"eval: {name.replace('_', ' ')} τ {results[f'tau_{name}']:.3f}, margin {margin['value']:+.3f} "
                f"({margin['low']:+.3f} to {margin['high']:+.3f})"
            )
    if results["greedy_identical"] is not None:
        same = "identical to the target's" if results["greedy_identical"] else "NOT the target's"
        progress.note(f"eval: greedy answers {same}, {results['num_ties']} ties")
