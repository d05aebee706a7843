"""Build the sets that later stages read: prompts to be answered, and the prepared set.

In: chats and a tokenizer, or the target's own answers as ids. Out: a prepared set with a fingerprint over data,
tokenizer, template and options; counts of what was dropped, by reason; the trained share, never silently none or all.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headrace.config import PrepareConfig, RunFile, RunFolder
from headrace.errors import PrepareError
from headrace.files import Stage
from headrace.prepare.chats import Chat, read_chats, written
from headrace.prepare.demo import demo_prompts
from headrace.prepare.mask import BoundaryUnclear, Masked, masked_samples
from headrace.prepare.prepared import Draft, write_prepared
from headrace.prepare.template import ChatTemplate, TemplateRefused, tokenizer_hash
from headrace.progress import Progress
from headrace.record import digest, sample_id


class Tally:
    """What became of each chat: dropped by reason, and tokens by who wrote them."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.tokens = self.trained = 0
        self._seen: set[bytes] = set()

    def drop(self, reason: str, example: str = "") -> None:
        """Count a chat that is left out; the first example of each reason is kept to be shown."""
        self.dropped[reason] += 1
        if example:
            self.examples.setdefault(reason, example)

    def told(self) -> list[str]:
        """Each reason with its count and first example."""
        shown = {reason: f" ({example})" for reason, example in self.examples.items()}
        return [f"{number} as {reason}{shown.get(reason, '')}" for reason, number in sorted(self.dropped.items())]

    def keep(self, draft: Draft, cfg: PrepareConfig, needs_training: bool) -> bool:
        """Decide on one sample and count it; `needs_training` is False for prompts."""
        reason = self._reason(draft, cfg, needs_training)
        if reason:
            self.drop(reason)
            return False
        self._seen.add(draft.id)
        self.tokens += len(draft.input_ids)
        self.trained += int(draft.loss_mask.sum())
        return True

    def _reason(self, draft: Draft, cfg: PrepareConfig, needs_training: bool) -> str:
        trained = int(draft.loss_mask.sum())
        if needs_training and trained == len(draft.loss_mask):
            raise PrepareError(
                "a prompt before the first trained token", "a sample trained on every token", "check the template"
            )
        if draft.id in self._seen:
            return "duplicate"
        if len(draft.input_ids) > cfg.max_tokens:
            return "too_long"
        return "too_few_trained_tokens" if needs_training and trained < cfg.min_trained_tokens else ""


def build_prompts(cfg: RunFile, folder: RunFolder, model: Path | str, progress: Progress) -> dict[str, Any]:
    """Write the prompts that the target is to answer: chats without their last assistant turn.

    Args: model: folder of the target's tokenizer.
    Raises: PrepareError for bad input; ConfigError when the folder was made from other data, tokenizer or options.
    """
    template = ChatTemplate.of(model, cfg.target.chat_template, cfg.prepare.template_args)

    def drafts(tally: Tally) -> Iterator[Draft]:
        for chat, held in _chats(cfg.prepare, tally):
            prompt = chat.prompt()
            if not any(m["content"].strip() for m in prompt if m["role"] == "user"):
                tally.drop("no_prompt", chat.place)
                continue
            try:
                ids = np.array(template.ids(prompt, prompt=True), dtype=np.int32)
            except TemplateRefused as exc:
                tally.drop("template_refused", f"{chat.place}: {exc.args[1]}")
                continue
            yield _draft((ids, np.zeros(len(ids), dtype=np.uint8)), chat.source, held, prompt)

    return _build(cfg, folder.prompts, "prompts", template, _data(cfg.prepare), drafts, progress)


def build_prepared(
    cfg: RunFile, folder: RunFolder, model: Path | str, progress: Progress, answers: Path | None = None
) -> dict[str, Any]:
    """Write the prepared set: from the data's own answers, or from `answers.jsonl` as ids, never re-tokenised.

    Raises: PrepareError for bad input, no trained token at all, or ids beyond the tokenizer's vocabulary;
        ConfigError when the folder was made from other data, tokenizer or options.
    """
    template = ChatTemplate.of(model, cfg.target.chat_template, cfg.prepare.template_args)
    if answers is None:
        return _build(
            cfg,
            folder.prepared,
            "prepare",
            template,
            _data(cfg.prepare),
            lambda t: _from_chats(cfg, template, t),
            progress,
        )
    if not answers.exists():
        raise PrepareError("the target's answers", f"no {answers}", "run `headrace regenerate` first")
    data = {"answers": _hash_file(answers), "drop_cut": cfg.regenerate.drop_cut}
    return _build(cfg, folder.prepared, "prepare", template, data, lambda t: _from_answers(cfg, answers, t), progress)


def _build(
    cfg: RunFile,
    folder: Path,
    name: str,
    template: ChatTemplate,
    data: Mapping[str, Any],
    drafts: Callable[[Tally], Iterator[Draft]],
    progress: Progress,
) -> dict[str, Any]:
    identity = {
        "data": data,
        "tokenizer": tokenizer_hash(template.tokenizer),
        "template": template.hash,
        "options": cfg.prepare.model_dump(exclude={"data", "heldout_data"}),
    }
    stage = Stage(folder, name, identity)
    if stage.state() == "done":
        progress.note(f"{name}: done before, kept")
        return stage.summary()
    tally = Tally()
    needs_training = name == "prepare"
    kept = [d for d in drafts(tally) if tally.keep(d, cfg.prepare, needs_training)]
    _check(kept, tally, template, needs_training)
    stage.begin()
    summary = _summary(kept, tally)
    write_prepared(
        folder,
        kept,
        {
            "fingerprint": digest(json.dumps(identity, sort_keys=True).encode()).hex(),
            "tokenizer_hash": identity["tokenizer"],
            "template_hash": identity["template"],
            "identity": identity,
            "counts": summary,
        },
    )
    stage.finish(summary)
    _tell(name, summary, tally, progress)
    return summary


def _chats(cfg: PrepareConfig, tally: Tally) -> Iterator[tuple[Chat, bool]]:
    """Each chat with whether it is held out: by its content, or because its file is."""
    held_prompts = {_prompt_hash(chat) for chat in read_chats(cfg.heldout_data, cfg.num_demo_prompts)}
    for number, chat in enumerate(read_chats(cfg.data, cfg.num_demo_prompts)):
        if cfg.max_samples is not None and number >= cfg.max_samples:
            break
        if _prompt_hash(chat) in held_prompts:
            tally.drop("also_in_heldout_data", chat.place)
        elif chat.tools:
            tally.drop("uses_tools", chat.place)
        else:
            yield chat, held_out(chat, cfg.heldout_fraction)
    for chat in read_chats(cfg.heldout_data, cfg.num_demo_prompts):
        if chat.tools:
            tally.drop("uses_tools", chat.place)
        else:
            yield chat, True


def held_out(chat: Chat, fraction: float) -> bool:
    """Decide by the content of the prompt alone, so that order, other chats and answers change nothing."""
    return _prompt_hash(chat) < fraction * 2**64


def _prompt_hash(chat: Chat) -> int:
    text = json.dumps([[m["role"], m["content"]] for m in chat.prompt()], ensure_ascii=False)
    return int(xxhash.xxh3_64_intdigest(b"held out\n" + text.encode()))


def _from_chats(cfg: RunFile, template: ChatTemplate, tally: Tally) -> Iterator[Draft]:
    for chat, held in _chats(cfg.prepare, tally):
        # An assistant turn that opens a chat answers nothing.
        answers = [written(m) for m in chat.messages[1:] if m["role"] == "assistant"]
        if not answers:
            tally.drop("no_assistant_turn", chat.place)
        elif not any(answers):
            tally.drop("empty_answer", chat.place)
        else:
            try:
                samples = masked_samples(template, chat.messages)
            except (BoundaryUnclear, TemplateRefused) as exc:
                reason = "boundary_unclear" if isinstance(exc, BoundaryUnclear) else "template_refused"
                tally.drop(reason, f"{chat.place}: {exc.args[1]}")
                continue
            yield from (_draft(sample, chat.source, held, chat.messages) for sample in samples)


def _from_answers(cfg: RunFile, path: Path, tally: Tally) -> Iterator[Draft]:
    with open(path, encoding="utf-8") as source:
        rows = [_answer(line, f"{path}:{number}") for number, line in enumerate(source, 1)]
    for row in sorted(rows, key=lambda row: int(row["row"])):
        prompt, answer = row["prompt_ids"], row["answer_ids"]
        if cfg.regenerate.drop_cut and row["finish_reason"] == "length":
            tally.drop("cut")
            continue
        if not answer:
            tally.drop("empty_answer", f"row {row['row']}")
            continue
        ids = np.array([*prompt, *answer], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt) :] = 1
        yield _draft((ids, mask), row["source"], row["heldout"], row["messages"])


_ANSWER_KEYS = {"row", "source", "heldout", "messages", "prompt_ids", "answer_ids", "finish_reason"}


def _answer(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise PrepareError("an answer on each line", f"{place}: {exc}", "run `headrace regenerate` again") from exc
    if not isinstance(row, dict) or not row.keys() >= _ANSWER_KEYS:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise PrepareError(f"keys {sorted(_ANSWER_KEYS)}", f"{place}: {found}", "run `headrace regenerate` again")
    return row


def _draft(sample: Masked, source: str, heldout: bool, messages: Iterable[Mapping[str, Any]]) -> Draft:
    ids, mask = sample
    text = json.dumps([dict(m) for m in messages], ensure_ascii=False)
    return Draft(sample_id(ids, mask), ids, mask, source, heldout, text)


def _check(kept: list[Draft], tally: Tally, template: ChatTemplate, needs_training: bool) -> None:
    why = "; ".join(tally.told()) or "nothing dropped"
    if not kept:
        raise PrepareError("at least one sample", f"none ({why})", "check the data and prepare's limits")
    if needs_training and not tally.trained:
        raise PrepareError("some trained tokens", f"none in {tally.tokens} tokens ({why})", "check the template")
    vocabulary = len(template.tokenizer)
    highest = max(int(d.input_ids.max()) for d in kept)
    if highest >= vocabulary:
        raise PrepareError(
            f"ids below the tokenizer's {vocabulary}", str(highest), "take the tokenizer the answers were made with"
        )


def _summary(kept: list[Draft], tally: Tally) -> dict[str, Any]:
    sources = Counter(d.source for d in kept)
    return {
        "num_samples": len(kept),
        "num_heldout": sum(d.heldout for d in kept),
        "num_tokens": tally.tokens,
        "trained_tokens": tally.trained,
        "roles": {
            "assistant": {"tokens": tally.trained, "trained": tally.trained},
            "prompt and template": {"tokens": tally.tokens - tally.trained, "trained": 0},
        },
        "dropped": dict(sorted(tally.dropped.items())),
        "sources": dict(sorted(sources.items())),
    }


def _tell(name: str, summary: Mapping[str, Any], tally: Tally, progress: Progress) -> None:
    share = summary["trained_tokens"] / max(summary["num_tokens"], 1)
    trained = f", {share:.1%} trained (all of them the assistant's)" if name == "prepare" else ""
    progress.note(
        f"{name}: {summary['num_samples']} samples, {summary['num_heldout']} held out, "
        f"{summary['num_tokens']:,} tokens{trained}"
    )
    for line in tally.told():
        progress.note(f"{name}: dropped {line}")


def _data(cfg: PrepareConfig) -> dict[str, Any]:
    """Content of the data, by name: a file that changed makes another set."""
    names = {
        f"{kind}:{name}": name for kind, names in (("data", cfg.data), ("heldout", cfg.heldout_data)) for name in names
    }
    demo = digest(json.dumps(demo_prompts(cfg.num_demo_prompts)).encode()).hex() if "demo" in names.values() else ""
    return {key: demo if name == "demo" else _hash_file(Path(name)) for key, name in names.items()}


def _hash_file(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    try:
        with open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                hasher.update(chunk)
    except OSError as exc:
        raise PrepareError("a readable file", str(exc), "check prepare.data") from exc
    return hasher.hexdigest()
