"""The run: steps in order, evaluated, logged and saved on the way.

In: a run file and a folder with prepared set and states. Out: `train/` with `last/`, `best/`, `metrics.jsonl`,
TensorBoard events and `stage.json`. A run that was stopped or killed goes on from its last checkpoint and, on a CPU
with as many threads, ends with the same bits as one that was not. Of several ranks the first alone reads and writes
`train/`, measures the time and decides; the others take up what it sends.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headrace.codec.registry import copy_basis
from headrace.config import RunFile, RunFolder, TrainConfig
from headrace.files import Stage
from headrace.progress import Progress
from headrace.source import Position
from headrace.stream.client import StreamSource
from headrace.train.assemble import Parts, assemble
from headrace.train.average import WeightAverage
from headrace.train.batches import Step
from headrace.train.checkpoint import (
    Checkpoint,
    RunState,
    last_checkpoint,
    load_checkpoint,
    mend_links,
    remove_strays,
    save_checkpoint,
)
from headrace.train.heldout import HeldOut
from headrace.train.memory import check_memory, needs
from headrace.train.metrics import MetricsLog, NoLog
from headrace.train.optimizer import build_optimizer, moments, restore_moments, set_learning_rate
from headrace.train.ranks import ALONE, Ranks
from headrace.train.replay import replayed_steps
from headrace.train.schedule import learning_rate, steps_within
from headrace.train.step import StepFigures, take_step
from headrace.train.stop import StopRequest, leave
from headrace.train.together import (
    Told,
    agree_to_end,
    check_agreement,
    check_alike,
    received_checkpoint,
    received_drafter,
    share_step,
)
from headrace.train.trackers import Trackers

# A time limit becomes a number of steps after so many of them, or, where steps are long, after this share of the limit.
MEASURED_STEPS = 20
MEASURED_SHARE = 0.1
GUESSED_STEPS = 250  # the learning rate's until then
WARM_STEPS = 3  # the first are slower than the rest and left out, at most half of what was measured


def train(cfg: RunFile, folder: RunFolder, features: bool, progress: Progress, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Train the drafter, or with `features` False the floor that sees no target state; go on where it stopped.

    Returns: the summary of stage.json: num_steps, num_epochs, tau, best_tau, num_tokens, seconds, num_holes, ...
    Raises: ConfigError naming a setting that differs from the run that is resumed; TrainError for parts that do not
    belong together, features, losses or gradients that are not finite, and damaged checkpoints. A signal raises
    KeyboardInterrupt (SIGINT) or SystemExit (SIGTERM) after the step is finished and saved.
    """
    where = folder.train(features)
    parts = assemble(cfg, folder, features and cfg.drafter.features)
    try:
        check_alike(parts.identity, ranks)
        stage = Stage(where, "train", parts.identity)
        state = ranks.decide(stage.state() if ranks.first else "new")
        if state == "done":
            progress.note(f"train: {where} is done")
            return ranks.decide(stage.summary() if ranks.first else {})
        if ranks.first and state == "new":
            stage.begin()
            for reason in parts.reasons:
                progress.note(f"train: {reason}")
        if ranks.first and parts.codec is not None:  # export and eval fold the codec into fc, whatever became of states
            copy_basis(parts.codec.spec, folder.states, where)
        with numerics(cfg.train.threads):
            summary = Training(parts, parts.train, where, progress, ranks).run()
        if ranks.first:
            stage.finish(summary)
        return summary
    finally:
        parts.close()


class Training:
    """One start of a run; `state` says where the run stands."""

    def __init__(self, parts: Parts, cfg: TrainConfig, where: Path, progress: Progress, ranks: Ranks = ALONE) -> None:
        """Take up the last checkpoint, or begin."""
        self.parts, self.cfg, self.where, self.progress, self.ranks = parts, cfg, where, progress, ranks
        self.began = self.saved = time.monotonic()
        self.made_from = {**parts.made_from, "threads": torch.get_num_threads(), "ranks": ranks.share.size}
        checkpoint = received_checkpoint(self._found() if ranks.first else None, ranks)
        self.drafter = received_drafter(parts, cfg.seed, ranks, self._tell_start if checkpoint is None else None)
        self.optimizer = build_optimizer(self.drafter, cfg, ranks)
        self.average = WeightAverage(self.drafter, cfg.ema) if cfg.ema else None
        if checkpoint is None:
            most = parts.plan.num_steps() * cfg.draws
            self.state = RunState(0, 0, 0, min(most, cfg.max_steps or most), made_from=self.made_from)
        else:
            self.state = self._take_up(checkpoint)
        self.declared = set(self.state.holes)
        self.before_s = self.state.elapsed_s
        self.step_seconds: list[float] = []
        self.eval_seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Train to the end of the plan, or to a signal."""
        self._check_memory()
        share = self.ranks.share
        heldout = HeldOut.read(self.parts.reader, self.parts.prepared, self.cfg.eval_samples, share)
        self.judged = self.ranks.sum([len(heldout.samples)])[0] > 0
        if not self.judged:
            self.progress.note("train: no held-out sample, so there is no τ and the last checkpoint is the best")
        steps = replayed_steps(
            self.parts.plan,
            self.parts.reader,
            self.parts.prepared,
            self.cfg,
            (self.state.epoch, self.state.place, self.state.draw),
            set(self.state.holes),
            share,
            self.declared,
        )
        with self._log() as log, StopRequest() as stop:
            if self.state.step == 0:
                log.write(0, tau=self._tau(heldout))
            self._start_progress()
            with closing(steps):  # stops the thread that reads ahead
                self._train(steps, heldout, log, stop)
            self.progress.end()
        return self._summary()

    def _tell_start(self, what: str) -> None:
        self.progress.note(f"train: drafter.init_from: {what}")

    def _check_memory(self) -> None:
        plan, shape = self.parts.plan, self.parts.shape
        num_parameters = sum(p.numel() for p in self.drafter.parameters())
        found = needs(shape, self.cfg, num_parameters, int(plan.lengths[plan.eligible].max()))
        self.progress.note(f"train: {check_memory(found, self.parts.device)} beside the head")

    def _log(self) -> MetricsLog:
        if not self.ranks.first:
            return NoLog()
        trackers = Trackers(self.cfg.trackers, self.where, self.parts.identity, self.progress)
        return MetricsLog(self.where, self.state.step, self.cfg.tensorboard, trackers)

    def _found(self) -> Checkpoint | None:
        """The last checkpoint of the folder, which is put in order."""
        for note in mend_links(self.where):
            self.progress.note(f"train: {note}")
        last = last_checkpoint(self.where)
        checkpoint = load_checkpoint(last) if last is not None else None
        remove_strays(self.where)
        return checkpoint

    def _train(self, steps: Iterator[Step], heldout: HeldOut, log: MetricsLog, stop: StopRequest) -> None:
        while self.state.step < self.state.num_steps:
            began = time.monotonic()
            step = next(steps)
            rate = learning_rate(self.state.step, self._schedule_steps(), self.cfg)
            set_learning_rate(self.optimizer, rate)
            figures = take_step(self.drafter, self.optimizer, self.parts.head, step, self.cfg, self.ranks)
            seconds = time.monotonic() - began
            told = share_step(step, self.ranks)
            self._advance(step, told)
            if self.average is not None:
                self.average.update(self.drafter, self.state.step)
            self._plan(seconds)
            finished = self.state.step == self.state.num_steps
            improved = self._evaluate(heldout) if finished or self.state.step % self.cfg.eval_every == 0 else None
            self._tell(log, step, figures, rate, (seconds, told), evaluated=improved is not None)
            asked, due = agree_to_end(stop.signal, time.monotonic() - self.saved >= self.cfg.save_seconds, self.ranks)
            if finished or improved or due or asked is not None:
                self._save(best=bool(improved) or (finished and not self.judged))
            if asked is not None and not finished:
                self.progress.note(f"train: {asked.name}, saved after step {self.state.step}")
                self.ranks.leave()
                leave(asked)

    def _schedule_steps(self) -> int:
        """Steps that the learning rate follows: the plan's, or before a time limit is turned into steps a guess."""
        unplanned = self.cfg.max_seconds is not None and not self.state.planned
        return min(self.state.num_steps, GUESSED_STEPS) if unplanned else self.state.num_steps

    def _take_up(self, checkpoint: Checkpoint) -> RunState:
        self.drafter.load_state_dict(checkpoint.weights)
        restore_moments(self.optimizer, self.drafter, checkpoint.moments)
        if self.average is not None:
            self.average.restore(checkpoint.average)
        state = checkpoint.state
        then, now = state.made_from["threads"], self.made_from["threads"]
        if then != now:
            self.progress.note(f"train: {then} threads before, {now} now: results may differ in the last bits")
        self.progress.note(f"train: goes on after step {state.step} of {state.num_steps}")
        return state

    def _advance(self, step: Step, told: Told) -> None:
        """Move past a step whose update is made."""
        draw = (step.draw + 1) % self.cfg.draws
        epoch, place = (step.epoch, step.start) if draw else self.parts.plan.after(step.epoch, step.end)
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            epoch=epoch,
            place=place,
            draw=draw,
            num_tokens=self.state.num_tokens + told.num_tokens,
            elapsed_s=self.before_s + time.monotonic() - self.began,
            holes={**self.state.holes, **told.holes},
        )
        self.declared.update(told.holes)
        for row, reason in told.holes.items():
            self.progress.note(f"train: row {row} has no states ({reason}); left out of every epoch")

    def _plan(self, seconds: float) -> None:
        """Turn the time limit into a number of steps, once enough of them are measured."""
        self.step_seconds.append(seconds)
        measured = len(self.step_seconds)
        if self.cfg.max_seconds is None or self.state.planned:
            return
        planned = self.ranks.decide(self._fitting(measured, self.cfg.max_seconds) if self.ranks.first else None)
        if planned is None:
            return
        self.state = replace(self.state, num_steps=planned, planned=True)
        self._start_progress()

    def _fitting(self, measured: int, limit_s: float) -> int | None:
        """The steps that fit into the time limit; None while too few are measured."""
        if measured < 2 or (measured < MEASURED_STEPS and self.state.elapsed_s < MEASURED_SHARE * limit_s):
            return None
        step_s = statistics.median(self.step_seconds[min(WARM_STEPS, measured // 2) :])
        left = limit_s - self.state.elapsed_s
        planned = steps_within(
            left, step_s, self.eval_seconds, self.cfg.eval_every, self.state.step, self.state.num_steps
        )
        self.progress.note(f"train: {planned} steps fit into {limit_s:.0f} s at {step_s:.2f} s a step")
        return planned

    def _tau(self, heldout: HeldOut) -> float | None:
        began = time.monotonic()
        with self.average.used(self.drafter) if self.average is not None else nullcontext():
            tau = heldout.tau(self.drafter, self.parts.head, self.cfg.autocast is True, self.ranks)
        self.eval_seconds = time.monotonic() - began
        return tau

    def _evaluate(self, heldout: HeldOut) -> bool:
        """Measure τ; say whether it is the best so far."""
        tau, best = self._tau(heldout), self.state.best_tau
        improved = tau is not None and (best is None or tau > best)
        self.state = replace(self.state, tau=tau, best_tau=tau if improved else best)
        return improved

    def _tell(
        self,
        log: MetricsLog,
        step: Step,
        figures: StepFigures | None,
        rate: float,
        took: tuple[float, Told],
        evaluated: bool,
    ) -> None:
        seconds, told = took
        wait_share = told.waited_s / max(seconds, 1e-9)
        tokens_s = told.num_tokens / max(seconds, 1e-9)
        log.write(
            self.state.step,
            epoch=step.epoch,
            loss=figures.loss if figures else None,
            ce=figures.ce if figures else None,
            hit_rate=figures.hit_rate if figures else None,
            grad_norm=figures.grad_norm if figures else None,
            tau=self.state.tau if evaluated else None,
            lr=rate,
            tokens=self.state.num_tokens,
            tokens_s=round(tokens_s, 1),
            data_wait_share=round(wait_share, 4),
            seconds=round(self.state.elapsed_s, 3),
        )
        shown: dict[str, float | str] = {"loss": figures.loss} if figures else {}
        if self.state.tau is not None:
            shown["tau"] = self.state.tau
        if isinstance(self.parts.source, StreamSource) and self.parts.source.sight.last is not None:
            shown["stream"] = self.parts.source.sight.last.line
        self.progress.advance(self.state.step, **shown, tokens_s=tokens_s, wait=wait_share)

    def _save(self, best: bool) -> None:
        """Write a checkpoint, once for all ranks, after a look at whether they still agree."""
        check_agreement(self.drafter, self.ranks)
        held = self.ranks.collect(moments(self.optimizer, self.drafter))
        if not self.ranks.first:
            return
        weights, average = (
            {name: t.detach().cpu().contiguous() for name, t in own.items()}
            for own in (self.drafter.state_dict(), self.average.weights if self.average is not None else {})
        )
        self.state = replace(
            self.state, elapsed_s=self.before_s + time.monotonic() - self.began, made_from=self.made_from
        )
        save_checkpoint(self.where, Checkpoint(weights, held, self.state, average), best)
        self.saved = time.monotonic()
        if self.parts.source is not None and self.state.epoch < self.parts.plan.epochs:
            row = int(self.parts.plan.rows(self.state.epoch)[self.state.place])
            position = Position(self.state.epoch, self.state.place, row, self.parts.prepared.sample_id(row))
            self.parts.source.commit(position)

    def _start_progress(self) -> None:
        self.progress.start("train", self.state.num_steps, "steps", self.state.step)

    def _summary(self) -> dict[str, Any]:
        state, vocabulary = self.state, self.parts.vocabulary
        return {
            "num_steps": state.step,
            "num_epochs": round(state.epoch + state.place / int(self.parts.plan.eligible.sum()), 3),
            "tau": state.tau,
            "best_tau": state.best_tau,
            "num_tokens": state.num_tokens,
            "num_samples": int(self.parts.plan.eligible.sum()),
            "num_holes": len(state.holes),
            "num_parameters": sum(p.numel() for p in self.drafter.parameters()),
            "features": self.parts.shape.features,
            "seconds": round(state.elapsed_s, 1),
            **({} if vocabulary is None else {"draft_vocabulary": asdict(vocabulary.coverage)}),
        }


@contextmanager
def numerics(threads: int | None) -> Iterator[None]:
    """Flush denormals, which slow AdamW's moments down manyfold on CPUs, and set threads; put back what is global."""
    before = torch.get_num_threads()
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
