"""Answers written by the target itself, so that a drafter learns what its target would say.

In: the prompts set and a target. Out: `answers/answers.jsonl`, one line a prompt, appended in chunks that are durable
before they count. A chunk's prompts are fixed by the prompts set and the batch size alone, and an unfinished chunk is
answered as a whole, so a killed run ends with the lines that an undisturbed one writes.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headrace.capture.one_pass import OnePass
from headrace.config import RunFile, RunFolder
from headrace.errors import CaptureError
from headrace.files import Stage
from headrace.prepare.grow import adopt, chain
from headrace.prepare.prepared import PreparedSet
from headrace.progress import Progress
from headrace.target.base import Generated, Target

ANSWERS = "answers.jsonl"
CHUNK_BATCHES = 8


def regenerate(cfg: RunFile, folder: RunFolder, target: Target, progress: Progress) -> dict[str, Any]:
    """Answer every prompt once; goes on where an earlier run stopped.

    Returns: num_answers, stopped, cut (at max_new_tokens), answer_tokens, seconds, tokens_s of this process.
    Raises: ConfigError when the answers folder was made from other inputs; CaptureError for a damaged line, and for
    lines that are missing or surplus.
    """
    prompts = PreparedSet.open(folder.prompts)
    adopt(folder.answers, "prompts", prompts)
    stage = Stage(folder.answers, "regenerate", _identity(cfg, prompts, target))
    path = folder.answers / ANSWERS
    if stage.state() == "done":
        summary = stage.summary()
        _check_lines(path, summary["num_answers"])
        progress.note("answers: done before, kept")
        return summary
    if stage.state() == "new":
        stage.begin()
    with ExitStack() as stack:
        together = None
        if cfg.regenerate.with_states:
            together = stack.enter_context(OnePass(cfg, folder, prompts, target, progress))
        written = _write_missing(cfg, prompts, target, path, progress, together)
    summary = {**_counts(read_answers(path)), **written}
    _check_lines(path, prompts.num_samples)
    stage.finish(summary)
    if summary["cut"]:
        progress.note(f"{summary['cut']} of {summary['num_answers']} answers met max_new_tokens and were cut")
    return summary


def chunks(lengths: Sequence[int], chunk_size: int) -> list[list[int]]:
    """Rows in chunks of similar prompt length: a pure function, so that a resumed run makes the same batches."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return [order[a : a + chunk_size] for a in range(0, len(order), chunk_size)]


def grown_chunks(prompts: PreparedSet, chunk_size: int) -> list[list[int]]:
    """Chunks of each set of prompts that this one grew from, then of what is new: growth changes no chunk."""
    ends = [rows for _, rows in chain(prompts)]
    spans = zip([0, *ends], ends, strict=False)
    return [[a + row for row in chunk] for a, b in spans for chunk in chunks(prompts.lengths[a:b].tolist(), chunk_size)]


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an answers file; a torn last line, left by a kill, is passed over.

    Raises: CaptureError naming any other line that is not JSON.
    """
    if not path.exists():
        return
    with open(path, "rb") as source:
        for number, line in enumerate(source, 1):
            if not line.endswith(b"\n"):
                return
            yield _parse(path, number, line)


def _check_lines(path: Path, expected: int) -> None:
    """A torn last line is no line here."""
    found = 0
    if path.exists():
        with open(path, "rb") as source:
            found = sum(line.endswith(b"\n") for line in source)
    if found != expected:
        raise CaptureError(
            f"{expected} lines in {path}", str(found), f"restore the file, or remove {path.parent} to answer again"
        )


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise CaptureError(
            "a JSON object on each line", f"{path}:{number}: {exc}", "remove the line and go on"
        ) from exc
    if not isinstance(row, dict) or not isinstance(row.get("row"), int):
        raise CaptureError("an answer with its row on each line", f"{path}:{number}", "remove the line and go on")
    return row


def _identity(cfg: RunFile, prompts: PreparedSet, target: Target) -> dict[str, Any]:
    spec = asdict(target.spec)
    kept = ("architecture", "dtype", "quantisation", "weights_hash", "tokenizer_hash")
    # batch_size belongs here: which prompts share a batch moves the last bits of bfloat16 logits
    how = cfg.regenerate.model_dump(exclude={"enabled", "drop_cut", "with_states"})
    settings = {f"regenerate.{key}": value for key, value in how.items()}
    return {"prompts": prompts.fingerprint, **{f"target {k}": spec[k] for k in kept}, **settings}


def _open_answers(path: Path) -> set[int]:
    """Rows answered before; cuts a torn last line away so that appending starts on a fresh one."""
    if not path.exists():
        return set()
    rows: set[int] = set()
    whole_bytes = 0
    with open(path, "rb") as source:
        for number, line in enumerate(source, 1):
            if line.endswith(b"\n"):
                rows.add(int(_parse(path, number, line)["row"]))
                whole_bytes += len(line)
    os.truncate(path, whole_bytes)
    return rows


def _write_missing(
    cfg: RunFile, prompts: PreparedSet, target: Target, path: Path, progress: Progress, together: OnePass | None
) -> dict[str, Any]:
    done = _open_answers(path)
    started = time.monotonic()
    tokens = 0
    num_done = num_shown = len(done)

    def told(new_tokens: int, finished: int) -> None:
        nonlocal tokens, num_shown
        tokens, num_shown = tokens + new_tokens, num_shown + finished
        progress.advance(num_shown, tokens_s=tokens / max(time.monotonic() - started, 1e-9))

    progress.start("regenerate", prompts.num_samples, "answers", num_done)
    how = cfg.regenerate
    with open(path, "ab") as out:
        for rows in grown_chunks(prompts, how.batch_size * CHUNK_BATCHES):
            if done.issuperset(rows):
                continue
            if together is not None:  # states are durable before their answers count
                made = together.answers(rows, done, told)
            else:
                ids = [prompts.sample(row).input_ids.tolist() for row in rows]
                answers = target.generate(
                    ids, how.max_new_tokens, how.temperature, how.top_p, how.seed, batch_size=how.batch_size, told=told
                )
                made = dict(zip(rows, answers, strict=True))
            missing = [(row, made[row]) for row in rows if row not in done]
            out.write(b"".join(_line(prompts, row, answer) for row, answer in missing))
            out.flush()
            os.fsync(out.fileno())
            num_done += len(missing)
            num_shown = num_done  # answers written again in a chunk that was cut off do not count twice
            told(0, 0)
    progress.end()
    seconds = time.monotonic() - started
    return {"seconds": round(seconds, 3), "tokens_s": round(tokens / max(seconds, 1e-9), 1)}


def _line(prompts: PreparedSet, row: int, answer: Generated) -> bytes:
    sample = prompts.sample(row)
    value = {
        "prompt_id": sample.id.hex(),
        "row": row,
        "source": sample.source,
        "heldout": sample.heldout,
        "messages": prompts.messages(row),
        "prompt_ids": sample.input_ids.tolist(),
        "answer_ids": list(answer.ids),
        "finish_reason": answer.finish_reason,
    }
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _counts(answers: Iterator[Mapping[str, Any]]) -> dict[str, int]:
    counts = {"num_answers": 0, "stopped": 0, "cut": 0, "answer_tokens": 0}
    for answer in answers:
        counts["num_answers"] += 1
        counts["stopped" if answer["finish_reason"] == "stop" else "cut"] += 1
        counts["answer_tokens"] += len(answer["answer_ids"])
    return counts
