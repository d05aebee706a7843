"""How many tokens there are to plan for.

In: numbers, a prepared set (exact lengths) or a file of chats (sampled; tokenised if the model's folder has a
`tokenizer.json`, else estimated). Out: samples, tokens, answer tokens, the longest sample, and where they come from.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import PlanError

SAMPLED_CHATS = 400
WHOLE_FILE_BYTES = 16 * 1024 * 1024
BYTES_PER_TOKEN = 4.0  # English text under vocabularies of 50 to 250 thousand; code and other scripts need fewer
MESSAGE_TOKENS = 5.0  # what a chat template puts around one message: two markers, a role, newlines
_ROLES = {"assistant": True, "gpt": True, "model": True, "chatgpt": True}


@dataclass(frozen=True)
class TokenCount:
    """What a data set weighs in tokens; `answer_tokens` is None where nobody said which are answers."""

    num_samples: int
    num_tokens: float
    answer_tokens: float | None
    longest: float
    origin: str
    exact: bool
    heldout_share: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens of a sample."""
        return self.num_tokens / self.num_samples

    @property
    def mean_answer(self) -> float | None:
        """Answer tokens of a sample."""
        return None if self.answer_tokens is None else self.answer_tokens / self.num_samples


def from_numbers(
    num_samples: int, mean_tokens: float | None, mean_prompt: float | None = None, mean_answer: float | None = None
) -> TokenCount:
    """Count from means: of whole samples, of prompts and of answers; any two give the third. Raises: PlanError."""
    if mean_prompt is not None and not 0 <= mean_prompt < math.inf:
        raise PlanError("0 or more prompt tokens a sample", f"{mean_prompt:g}", "check --mean-prompt")
    if mean_tokens is None and mean_prompt is not None and mean_answer is not None:
        mean_tokens = mean_prompt + mean_answer
    if mean_answer is None and mean_tokens is not None and mean_prompt is not None:
        mean_answer = mean_tokens - mean_prompt
    if mean_tokens is None:
        raise PlanError(
            "the mean tokens of a sample", "none", "give --mean-tokens, or --mean-prompt with --mean-answer"
        )
    if num_samples < 1 or not 0 < mean_tokens < math.inf:
        raise PlanError(
            "at least one sample of at least one token",
            f"{num_samples} of {mean_tokens:g}",
            "check --samples and --mean-tokens",
        )
    if mean_answer is not None and not 0 <= mean_answer <= mean_tokens:
        raise PlanError(f"0 to {mean_tokens:g} answer tokens a sample", f"{mean_answer:g}", "check --mean-answer")
    if mean_prompt is not None and mean_answer is not None and abs(mean_prompt + mean_answer - mean_tokens) > 1:
        expected = f"prompt and answer that make {mean_tokens:g} tokens"
        raise PlanError(expected, f"{mean_prompt:g} and {mean_answer:g}", "give two of the three means")
    answers = None if mean_answer is None else num_samples * mean_answer
    return TokenCount(num_samples, num_samples * mean_tokens, answers, mean_tokens, "numbers given", True)


def from_prepared(folder: Path) -> TokenCount:
    """Count a prepared set exactly, held-out samples included. Raises: PlanError."""
    import pyarrow as pa

    path = folder / "samples.arrow"
    if not (folder / "manifest.json").is_file():
        raise PlanError(
            "a prepared set", f"no {folder / 'manifest.json'}", "run `headrace prepare`, or plan from numbers"
        )
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            lengths, trained, heldout = (table[name].to_numpy() for name in ("num_tokens", "trained_tokens", "heldout"))
    except (OSError, KeyError, pa.ArrowInvalid) as exc:
        raise PlanError("samples.arrow of a prepared set", f"{path}: {exc}", "prepare again") from exc
    if not len(lengths):
        raise PlanError("at least one sample", f"{folder} is empty", "check what prepare dropped")
    origin = f"exact lengths of the prepared set {folder}"
    total = float(lengths.sum())
    share = float(lengths[heldout].sum()) / total if total else 0.0
    return TokenCount(len(lengths), total, float(trained.sum()), float(lengths.max()), origin, True, share)


def from_chats(path: Path, model: str | None = None) -> TokenCount:
    """Count a JSONL file of chats from a sample of it, spread over the file.

    Raises: PlanError for no file, an empty file, a broken line and an unknown layout.
    """
    rows, num_rows = _sample_rows(path)
    count, how = _counter(model)
    prompt = answer = longest = 0.0
    for row in rows:
        texts = list(_texts(row, path))
        length = sum(count(text) + MESSAGE_TOKENS for _, text in texts)
        said = sum(count(text) + 1 for is_answer, text in texts if is_answer)
        prompt, answer, longest = prompt + length - said, answer + said, max(longest, length)
    scale = num_rows / len(rows)
    origin = f"{len(rows)} of {'' if scale == 1 else 'about '}{num_rows:,} chats of {path.name}, {how}"
    return TokenCount(num_rows, (prompt + answer) * scale, answer * scale or None, longest, origin, False)


def _sample_rows(path: Path) -> tuple[list[Mapping[str, Any]], int]:
    try:
        size = path.stat().st_size
        lines = _whole(path) if size <= WHOLE_FILE_BYTES else _spread(path, size)
    except OSError as exc:
        raise PlanError("a readable JSONL file of chats", str(exc), "check the path") from exc
    if not lines:
        raise PlanError("at least one chat", f"{path} is empty", "check the path")
    if size <= WHOLE_FILE_BYTES:
        step = max(1, len(lines) // SAMPLED_CHATS)
        return [_row(line, path) for line in lines[::step]], len(lines)
    mean_bytes = sum(map(len, lines)) / len(lines)
    return [_row(line, path) for line in lines], round(size / mean_bytes)


def _whole(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.strip()]


def _spread(path: Path, size: int) -> list[bytes]:
    """Whole lines from evenly spaced places: the line after each, which its own length does not favour."""
    lines = []
    with open(path, "rb") as source:
        for place in range(SAMPLED_CHATS):
            source.seek(size * place // SAMPLED_CHATS)
            if place:
                source.readline()
            line = source.readline()
            if line.strip():
                lines.append(line)
    return lines


def _row(line: bytes, path: Path) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise PlanError(
            "a JSON object on each line", f"{path}: {line[:60]!r}... ({exc})", "mend or remove the line"
        ) from exc
    if not isinstance(row, Mapping):
        raise PlanError("a JSON object on each line", f"{path}: a {type(row).__name__}", "mend or remove the line")
    return row


def _texts(row: Mapping[str, Any], path: Path) -> Iterator[tuple[bool, str]]:
    """Each text of a chat, and whether it is an answer."""
    turns = row.get("messages") or row.get("conversations")
    if isinstance(turns, list) and all(isinstance(t, Mapping) for t in turns):
        for turn in turns:
            role = str(turn.get("role") or turn.get("from") or "")
            text = turn.get("content") if turn.get("content") is not None else turn.get("value")
            yield role in _ROLES, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return
    asked = next((row[k] for k in ("prompt", "question", "instruction") if isinstance(row.get(k), str)), None)
    if asked is None:
        raise PlanError(
            "`messages`, `conversations`, or `prompt` with `response`",
            f"{path}: keys {', '.join(sorted(row))}",
            "convert the file, or plan from --samples and --mean-tokens",
        )
    yield False, asked
    said = next((row[k] for k in ("response", "completion", "answer", "output") if isinstance(row.get(k), str)), None)
    if said is not None:
        yield True, said


def _counter(model: str | None) -> tuple[Any, str]:
    """A function from text to its number of tokens, and in words which."""
    folder = Path(model).expanduser() if model else None
    if folder is not None and folder.is_file():
        folder = folder.parent
    if folder is None or not (folder / "tokenizer.json").is_file():
        return (
            lambda text: len(text.encode("utf-8")) / BYTES_PER_TOKEN,
            f"estimated at {BYTES_PER_TOKEN:g} bytes a token: no tokenizer.json is at hand",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), "tokenised, template marks estimated"
