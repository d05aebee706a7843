"""The stages of a run in order, each a call into its room, timed.

In: a resolved run file and a progress. Out: what each stage wrote under the run's folder, its resolved settings beside
it, and a line in `stages.jsonl` with the seconds it took. A stage that is done is skipped by its own room.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import RESOLVED, Resolved, RunFolder
from headrace.errors import ConfigError
from headrace.files import append_json_line, locked, read_stage, write_json
from headrace.progress import Progress, Silent

if TYPE_CHECKING:
    from headrace.target.engine_target import EngineTarget
    from headrace.target.transformers_target import TransformersTarget

Summary = dict[str, Any]


class Run:
    """One run: its settings, its folder, and the target, loaded when a stage first needs it."""

    def __init__(self, resolved: Resolved, progress: Progress) -> None:
        self.resolved = resolved
        self.cfg = resolved.run
        self.folder = RunFolder(Path(resolved.run.run))
        self.progress = progress
        self._target: TransformersTarget | None = None
        self._engines: EngineTarget | None = None

    def target(self, dtype: str | None = None) -> "TransformersTarget":
        """The target in the run's dtype, or in another for evaluation."""
        from headrace.target.transformers_target import load_target

        wanted = dtype or self.cfg.target.dtype
        if self._target is None or self._target.spec.dtype != wanted:
            self._target = load_target(self.cfg.target.model_copy(update={"dtype": wanted}))
        return self._target

    def capturing(self) -> "TransformersTarget | EngineTarget":
        """Whatever answers and captures: the target, or its engines."""
        if self.cfg.target.engine == "transformers":
            return self.target()
        if self._engines is None:
            from headrace.target.engine_target import open_engines

            self._engines = open_engines(self.cfg, self.folder)
        return self._engines

    def model_folder(self) -> Path:
        """Where the target's files lie; the built-in target is made on first use."""
        from headrace.target.transformers_target import target_folder

        return target_folder(self.cfg.target.model)

    def release_target(self) -> None:
        """Drop the target from memory; training needs only its embedding and head."""
        self._target = None

    @contextmanager
    def timed(self, name: str, folder: Path) -> Iterator[None]:
        """Hold a stage's folder alone, keep the resolved settings beside its output, and log how long it took.

        Settings are written by the start that begins a stage and by the one that ends it; a start that is refused, or
        finds all done, writes nothing.
        """
        self.progress.note(f"[{name}]")
        started, clock, known, before = time.time(), time.monotonic(), _state(folder), _written(folder)
        with locked(folder, name):
            try:
                first = not (folder / RESOLVED).exists()
                if first:
                    self.resolved.save(folder)
                yield
            except BaseException as exc:
                if first and _state(folder) == "new":  # refused before it began
                    (folder / RESOLVED).unlink(missing_ok=True)
                    _remove_if_empty(folder)
                if not isinstance(exc, ConfigError):
                    self._log(name, started, clock)
                raise
            if known != "done" or _written(folder) != before:  # a set that is done may have grown
                self.resolved.save(folder)
            self._log(name, started, clock)

    def _log(self, name: str, started: float, clock: float) -> None:
        line = {"stage": name, "started": round(started, 3), "seconds": round(time.monotonic() - clock, 3)}
        append_json_line(self.folder.root / "stages.jsonl", line)


def _state(folder: Path) -> str:
    """Whether a stage is new, begun or done, as its stage.json says; its own room judges a damaged one."""
    try:
        stage = read_stage(folder)
    except ConfigError:
        return "begun"
    if stage is None:
        return "new"
    return "done" if stage["finished"] else "begun"


def _written(folder: Path) -> bytes:
    """What the stage last wrote of itself."""
    path = folder / "stage.json"
    return path.read_bytes() if path.exists() else b""


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def prepare(run: Run) -> Summary:
    """Chats to prompts (when the target is to answer them) or straight to the prepared set."""
    from headrace.prepare.build import build_prepared, build_prompts

    if run.cfg.regenerate.enabled:
        with run.timed("prepare", run.folder.prompts):
            return build_prompts(run.cfg, run.folder, run.model_folder(), run.progress)
    with run.timed("prepare", run.folder.prepared):
        return build_prepared(run.cfg, run.folder, run.model_folder(), run.progress)


def regenerate(run: Run) -> Summary:
    """The target answers the prompts; prompts and answers become the prepared set."""
    if not run.cfg.regenerate.enabled:
        run.progress.note("regenerate is off in the run file: the answers of the data are kept")
        return {}
    from headrace.capture.regenerate import regenerate as answer
    from headrace.prepare.build import build_prepared

    with run.timed("regenerate", run.folder.answers):
        answers = answer(run.cfg, run.folder, run.capturing(), run.progress)
    with run.timed("prepare answers", run.folder.prepared):
        path = run.folder.answers / "answers.jsonl"
        prepared = build_prepared(run.cfg, run.folder, run.model_folder(), run.progress, answers=path)
        return {"answers": answers, "prepared": prepared}


def capture_on_ray(run: Run) -> Summary:
    """The target's states, from targets on a Ray cluster: to the bit those of `capture` on one such machine."""
    from headrace.capture.capture import capture as capture_states
    from headrace.capture.fleet import open_fleet
    from headrace.capture.probe import PROBE_FILE
    from headrace.raw_slice import with_codec

    with run.timed("capture", run.folder.states), open_fleet(run.cfg, run.progress) as fleet:
        if not (run.folder.root / PROBE_FILE).exists():
            run.progress.note("probe: none by itself with --ray; run headrace probe on a machine with the target")
        cfg = with_codec(run.cfg, run.folder, lambda: fleet, run.progress)
        return capture_states(cfg, run.folder, fleet, run.progress)


def capture(run: Run) -> Summary:
    """The target's states, checked, encoded, stored."""
    from headrace.capture.capture import capture as capture_states
    from headrace.capture.capture import give_codec
    from headrace.capture.probe_run import probe_before_capture
    from headrace.raw_slice import with_codec

    with run.timed("capture", run.folder.states):
        cfg = with_codec(run.cfg, run.folder, run.capturing, run.progress)
        give_codec(cfg, run.capturing())
        probe_before_capture(cfg, run.folder, run.capturing(), run.target, run.progress)
        return capture_states(cfg, run.folder, run.capturing(), run.progress)


def capture_slice(run: Run, num_tokens: int) -> Summary:
    """Raw states of a few samples, to fit and judge codecs on."""
    from headrace.raw_slice import capture_slice as capture_raw

    where = run.folder.root / "slice"
    with run.timed("capture a slice", where):
        part = capture_raw(run.cfg, run.folder, run.capturing(), num_tokens, run.progress)
        return {"folder": str(part.root)}


def train(run: Run) -> Summary:
    """The drafter, and the floor that sees no target state: as many steps, on the same samples. One process, or the
    ranks that torchrun started."""
    from headrace.target.device import choose_device
    from headrace.train.loop import train as train_drafter
    from headrace.train.ranks import joined

    run.release_target()
    with joined(choose_device(run.cfg.target.device)) as ranks:
        progress = run.progress if ranks.first else Silent()
        timed = run.timed if ranks.first else _untimed
        with timed("train", run.folder.train()):
            summaries = {"drafter": train_drafter(run.cfg, run.folder, True, progress, ranks)}
        if run.cfg.floor:
            same = {"max_steps": summaries["drafter"]["num_steps"], "max_seconds": None, "objective": "ce"}
            cfg = run.cfg.model_copy(update={"train": run.cfg.train.model_copy(update=same)})
            with timed("train the no-features floor", run.folder.train(False)):
                summaries["floor"] = train_drafter(cfg, run.folder, False, progress, ranks)
    return summaries


@contextmanager
def _untimed(_name: str, _folder: Path) -> Iterator[None]:
    """A rank that is not the first neither locks a folder nor writes into it."""
    yield


def export(run: Run, speculators: bool = False, push_to: str | None = None) -> Summary:
    """The drafter as a stock checkpoint with a model card; in speculators' layout too, or on the hub."""
    from headrace.export.run import export_run

    with run.timed("export", run.folder.export):
        return export_run(run.cfg, run.folder, run.progress, speculators=speculators, push_to=push_to)


def evaluate(run: Run, drafter: Path | None = None, engine: str = "transformers") -> Summary:
    """τ, floors and greedy identity on held-out prompts; of the checkpoint, or of an exported folder.

    Args: engine: vllm serves the exported drafter in a real server, beside our own evaluation of it.
    """
    if engine not in ("transformers", "vllm"):
        raise ConfigError("--engine transformers or vllm", engine, "see headrace eval --help")
    if engine == "vllm":
        from headrace.evaluate.engine import FOLDER, evaluate_in_engine

        with run.timed("eval in vllm", run.folder.root / FOLDER):
            target = run.target(run.cfg.evaluate.dtype)
            return evaluate_in_engine(run.cfg, run.folder, target, run.progress, drafter)
    from headrace.evaluate.run import evaluate as evaluate_drafter
    from headrace.export.run import refresh_card

    with run.timed("eval", run.folder.evaluation):
        target = run.target(run.cfg.evaluate.dtype)
        results = evaluate_drafter(run.cfg, run.folder, target, run.progress, drafter=drafter)
        refresh_card(run.cfg, run.folder)
        return results


def report(run: Run) -> Summary:
    """`report.html` and `results.json`."""
    from headrace.report.page import write_report

    results = write_report(run.folder, run.resolved)
    write_json(run.folder.root / "results.json", results)
    return results


STAGES: dict[str, Callable[[Run], Summary]] = {
    "prepare": prepare,
    "regenerate": regenerate,
    "capture": capture,
    "train": train,
    "export": export,
    "eval": evaluate,
    "report": report,
}


def run_all(run: Run) -> Summary:
    """Every stage in order; from training on where `source` names servers, or `headrace store import` made the folder.

    Raises: ConfigError for an import that has not ended, and for a streamed run without its prepared set.
    """
    summary: Summary = {}
    streamed = run.cfg.source is not None
    if streamed and not run.folder.prepared.is_dir():
        hint = "copy the folder from the machine that captures, see docs/streaming.md"
        raise ConfigError("the prepared set that is served", f"no {run.folder.prepared}", hint)
    states = read_stage(run.folder.states)
    came_in = states is not None and states.get("stage") == "import"
    if came_in and _state(run.folder.states) != "done":
        found, hint = f"one that was stopped in {run.folder.states}", "run the same `headrace store import` again"
        raise ConfigError("a finished import", found, hint)
    for name, stage in STAGES.items():
        if (came_in or streamed) and name in ("prepare", "regenerate", "capture"):
            why = f"states come from {run.cfg.source}" if streamed else "set and states came from another program"
            run.progress.note(f"{name}: left out, {why}")
        else:
            summary = stage(run)
    return summary
