"""A healthy run in figures, and the same run with one thing wrong. Nothing here trains: figures have the shape that
`headrace train`, `eval` and `capture` write."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import RunFolder
from headrace.doctor.evidence import Evidence, Served
from headrace.evaluate.interval import PerPrompt, margin_interval, tau_interval
from headrace.files import append_json_line, write_json
from headrace.prepare.prepared import Draft, PreparedSet, write_prepared
from headrace.record import sample_id

OPENING, ENDING, THINKING = [1, 2], [3, 4], [3, 4, 5]
ENGLISH, RUSSIAN = "a question about rivers", "вопрос о реках и мельницах"
NUM_TRAINED, NUM_HELDOUT = 400, 60
STEPS, EVERY = 400, 40


def prepared_set(folder: Path, long_share: float = 0.3, russian_share: float = 0.3) -> PreparedSet:
    """Held-out prompts: a third long, a third Russian; of the training samples the shares given."""
    rng = np.random.default_rng(0)

    def draft(row: int) -> Draft:
        heldout = row >= NUM_TRAINED
        place = (row - NUM_TRAINED) / NUM_HELDOUT if heldout else row / NUM_TRAINED
        long = (row % 3 == 0) if heldout else place < long_share
        russian = (row % 3 == 1) if heldout else 1 - place <= russian_share
        body = rng.integers(10, 60, 400 if long else 20 + row % 5).tolist()
        ids = np.array([*OPENING, *body, *ENDING, *rng.integers(10, 60, 12)], dtype=np.int32)
        mask = (np.arange(len(ids)) >= len(ids) - 12).astype(np.uint8)
        text = json.dumps([{"role": "user", "content": RUSSIAN if russian else ENGLISH}])
        return Draft(sample_id(ids, mask), ids, mask, "ru" if russian else "en", heldout, text)

    write_prepared(folder, (draft(row) for row in range(NUM_TRAINED + NUM_HELDOUT)), {"fingerprint": "story"})
    return PreparedSet.open(folder)


def lines(ce: float, hit_rate: float, tau: float, wait: float = 0.02, steps: int = STEPS) -> list[dict[str, Any]]:
    """Metrics of a run whose cross-entropy falls to `ce` and whose held-out τ rises to `tau`."""
    found: list[dict[str, Any]] = [{"step": 0, "tau": 1.0}]
    for step in range(1, steps + 1):
        gone = step / steps
        line = {"step": step, "ce": ce + 6 * (1 - gone) ** 4, "hit_rate": hit_rate * gone, "data_wait_share": wait}
        line |= {"tokens": step * 4000, "seconds": step * 2.0}
        if step % max(1, steps // (STEPS // EVERY)) == 0:
            line["tau"] = tau - (tau - 1) * (1 - gone) ** 2
        found.append(line)
    return found


def passes(tau: float, seed: int, num_passes: int = 40) -> list[int]:
    """Tokens of each pass of one prompt, 1 or 3 so that their mean is about τ."""
    return [3 if draw < (tau - 1) / 2 else 1 for draw in np.random.default_rng(seed).random(num_passes)]


def evaluation(
    prepared: PreparedSet, tau: float, floor: float, weak: dict[str, float]
) -> tuple[dict[str, Any], list[Any]]:
    """results.json and the lines of prompts.jsonl; `weak` gives `long` or `ru` prompts a τ of their own."""
    sources = prepared.sources()
    found = []
    for row in np.flatnonzero(prepared.heldout).tolist():
        long = int(prepared.prompt_tokens[row]) > 100
        own = weak.get("long", tau) if long else weak.get(sources[row], tau)
        found.append({"row": row, "source": sources[row], "drafter": {"gained": passes(own, row)}})
    counts = _counts([line["drafter"]["gained"] for line in found])
    under = _counts([passes(floor, line["row"]) for line in found])
    interval = tau_interval(counts, 0)
    results = {
        "tau": interval.value,
        "tau_interval": [interval.low, interval.high],
        "tau_no_features": tau_interval(under, 0).value,
        "margin_no_features": margin_interval(counts, under, 0).to_json(),
        "num_prompts": len(found),
    }
    return results, found


def _counts(gained: Sequence[Sequence[int]]) -> PerPrompt:
    return PerPrompt([sum(g) for g in gained], [len(g) for g in gained])


def served(ending: Sequence[int] = ENDING, tau: float | None = None) -> list[Served]:
    """Requests as a server saw them."""
    return [
        Served((*OPENING, *range(20 + i, 40 + i), *ending), tuple(passes(tau, i)) if tau is not None else ())
        for i in range(20)
    ]


def drift(num_drifted: int) -> dict[str, Any]:
    """A capture's summary."""
    told = {"fitted": 0.01, "limit": 0.02, "lost": 0.012, "worst": 0.3, "worst_row": 3, "num_records": 400}
    return {"drift": {**told, "drifted": {"code": num_drifted} if num_drifted else {}, "alarm": num_drifted >= 40}}


def healthy(folder: Path, **changes: Any) -> Evidence:
    """A run with nothing wrong; `changes` spoil it: of `lines`, `evaluation`, the prepared set, or fields outright."""
    prepared = prepared_set(folder, **{k: changes.pop(k) for k in ("long_share", "russian_share") if k in changes})
    tau, floor, weak = changes.pop("tau", 2.4), changes.pop("floor", 1.4), changes.pop("weak", {})
    metrics = lines(**{"ce": 2.0, "hit_rate": 0.5, "tau": 2.4, **changes.pop("metrics", {})})
    floor_metrics = lines(ce=changes.pop("floor_ce", 4.0), hit_rate=0.2, tau=floor, steps=len(metrics) - 1)
    results, prompts = evaluation(prepared, tau, floor, weak)
    run = Evidence(
        metrics=metrics[1:],
        floor_metrics=floor_metrics[1:],
        taus=[(m["step"], m.get("tokens", 0), m["tau"]) for m in metrics if "tau" in m],
        results=results,
        prompts=prompts,
        captured=drift(0),
        prepared=prepared,
        served=served(tau=2.4),
    )
    return dataclasses.replace(run, **changes)


def write_run(root: Path, run: Evidence) -> Path:
    """The same run as files; its prepared set must lie in `root`/prepared. Returns: the file of what was served."""
    folder = RunFolder(root)
    folder.train().mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in [{"step": 0, "tau": 1.0}, *run.metrics])
    (folder.train() / "metrics.jsonl").write_text(text + '{"step": 999, "ce"')  # a running run's last line is torn
    for line in run.floor_metrics:
        append_json_line(folder.train(False) / "metrics.jsonl", line)
    write_json(folder.evaluation / "results.json", run.results)
    for line in run.prompts:
        append_json_line(folder.evaluation / "prompts.jsonl", line)
    write_json(folder.states / "stage.json", {"identity": {}, "finished": True, "summary": dict(run.captured)})
    for one in run.served:
        append_json_line(root / "served.jsonl", {"prompt_ids": list(one.prompt_ids), "gained": list(one.gained)})
    return root / "served.jsonl"
