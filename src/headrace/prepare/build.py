"""Build the sets that later stages read: prompts to be answered, and the prepared set.

In: chats and a tokenizer, or the target's own answers as ids. Out: a prepared set with a fingerprint over data,
tokenizer, template and options; counts of what was dropped, by reason; the trained share, never silently none or all.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headrace.config import PrepareConfig, RunFile, RunFolder
from headrace.errors import PrepareError
from headrace.files import Stage
from headrace.kinds import DEMO_DATA, DataSource
from headrace.prepare.chats import Chat, read_chats, written
from headrace.prepare.demo import demo_prompts
from headrace.prepare.grow import Growth
from headrace.prepare.kept import NotKept, check_kept
from headrace.prepare.mask import BoundaryUnclear, Masked, Trained, masked_samples
from headrace.prepare.model_files import max_positions
from headrace.prepare.prepared import Draft, write_prepared
from headrace.prepare.rows import content_digest, hash_file, source_name
from headrace.prepare.template import ChatTemplate, TemplateRefused, tokenizer_hash
from headrace.progress import Progress
from headrace.record import digest, sample_id

BEYOND_POSITIONS = "beyond_target_positions"
PROMPT_HELD_OUT = "prompt_held_out"


class Tally:
    """What became of each chat: dropped by reason, and tokens by who wrote them."""

    def __init__(self, cfg: PrepareConfig, needs_training: bool, room: int | None) -> None:
        """Args: needs_training: False for prompts. room: tokens the target has positions for, None if unknown."""
        self._cfg = cfg
        self._needs_training = needs_training
        self._room = room
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

    def keep(self, draft: Draft, heldout_prompts: Set[bytes]) -> bool:
        """Decide on one sample and count it; no prompt that is held out is trained on."""
        reason = self._reason(draft, heldout_prompts)
        if reason:
            sizes = f"{len(draft.input_ids)} tokens where there is room for {self._room}"
            self.drop(reason, sizes if reason == BEYOND_POSITIONS else "")
            return False
        self._seen.add(draft.id)
        self.tokens += len(draft.input_ids)
        self.trained += int(draft.loss_mask.sum())
        return True

    def _reason(self, draft: Draft, heldout_prompts: Set[bytes]) -> str:
        length, trained = len(draft.input_ids), int(draft.loss_mask.sum())
        if self._needs_training and trained == length:
            raise PrepareError(
                "a prompt before the first trained token", "a sample trained on every token", "check the template"
            )
        if not draft.heldout and draft.prompt in heldout_prompts:
            return PROMPT_HELD_OUT
        if draft.id in self._seen:
            return "duplicate"
        if length > self._cfg.max_tokens:
            return "too_long"
        if self._room is not None and length > self._room:
            return BEYOND_POSITIONS
        few = self._needs_training and trained < self._cfg.min_trained_tokens
        return "too_few_trained_tokens" if few else ""


@dataclass(frozen=True)
class _Work:
    """A set to be built: its name as a stage, where it goes, and what it is made from besides prepare's settings."""

    name: str
    folder: Path
    template: ChatTemplate
    made_from: Mapping[str, Any]
    room: int | None


def build_prompts(cfg: RunFile, folder: RunFolder, model: Path | str, progress: Progress) -> dict[str, Any]:
    """Write the prompts that the target is to answer: chats without their last assistant turn.

    Args: model: folder of the target's tokenizer.
    Raises: PrepareError for bad input; ConfigError when the folder was made from other data, tokenizer or options.
    """
    template = ChatTemplate.of(model, cfg.target.chat_template, cfg.prepare.template_args)

    def drafts(tally: Tally) -> Iterator[Draft]:
        for chat, whole in _chats(cfg.prepare, tally):
            prompt = chat.prompt()
            if chat.input_ids is not None:
                raise PrepareError(
                    "chats whose answers can be written anew",
                    f"{chat.place}: token ids with their mask",
                    "set regenerate.enabled=false for such data",
                )
            if not any(m["content"].strip() for m in prompt if m["role"] == "user"):
                tally.drop("no_prompt", chat.place)
                continue
            try:
                check_kept(template, template.served(prompt), chat.tools)
                ids = np.array(template.ids(prompt, prompt=True, tools=chat.tools), dtype=np.int32)
            except (NotKept, TemplateRefused) as exc:
                tally.drop(_reason_of(exc), f"{chat.place}: {exc.args[1]}")
                continue
            draft = _draft((ids, np.zeros(len(ids), dtype=np.uint8)), chat.source, prompt)
            yield replace(draft, heldout=whole or held_out(draft, cfg.prepare.heldout_fraction))

    positions, answer = max_positions(model), cfg.regenerate.max_new_tokens
    made_from = {"data": _data(cfg.prepare), "target positions": positions, "regenerate.max_new_tokens": answer}
    room = None if positions is None else positions - answer
    return _build(cfg.prepare, _Work("prompts", folder.prompts, template, made_from, room), drafts, progress)


def build_prepared(
    cfg: RunFile, folder: RunFolder, model: Path | str, progress: Progress, answers: Path | None = None
) -> dict[str, Any]:
    """Write the prepared set: from the data's own answers, or from `answers.jsonl` as ids, never re-tokenised.

    Raises: PrepareError for bad input, no trained token at all, or ids beyond the tokenizer's vocabulary;
        ConfigError when the folder was made from other data, tokenizer or options.
    """
    template = ChatTemplate.of(model, cfg.target.chat_template, cfg.prepare.template_args)
    if answers is None:
        data = _data(cfg.prepare)
    elif answers.exists():
        data = {"answers": hash_file(answers), "drop_cut": cfg.regenerate.drop_cut}
    else:
        raise PrepareError("the target's answers", f"no {answers}", "run `headrace regenerate` first")
    positions = max_positions(model)
    work = _Work("prepare", folder.prepared, template, {"data": data, "target positions": positions}, positions)

    def drafts(tally: Tally) -> Iterator[Draft]:
        return _from_chats(cfg, template, tally) if answers is None else _from_answers(cfg, answers, tally)

    return _build(cfg.prepare, work, drafts, progress)


def _build(
    cfg: PrepareConfig, work: _Work, drafts: Callable[[Tally], Iterator[Draft]], progress: Progress
) -> dict[str, Any]:
    name, template = work.name, work.template
    identity = {
        **work.made_from,
        "tokenizer": tokenizer_hash(template.tokenizer),
        "template": template.hash,
        "options": cfg.decisive(),
    }
    stage = Stage(work.folder, name, identity)
    growth = Growth.of(work.folder, name, stage.identity)
    if growth is None and stage.state() == "done":
        progress.note(f"{name}: done before, kept")
        return stage.summary()
    needs_training = name == "prepare"
    tally = Tally(cfg, needs_training, work.room)
    made = list(drafts(tally))
    heldout_prompts = {draft.prompt for draft in made if draft.heldout}
    kept = [draft for draft in made if tally.keep(draft, heldout_prompts)]
    if cfg.shuffle:
        kept.sort(key=lambda draft: xxhash.xxh3_64_intdigest(b"shuffle\n" + draft.id))
    if growth is not None:
        kept = growth.ordered(kept)
    _check(kept, tally, template, needs_training)
    if growth is None:
        stage.begin()
    summary = _summary(kept, tally)
    fingerprint = digest(json.dumps(identity, sort_keys=True).encode()).hex()
    manifest = {
        "fingerprint": fingerprint,
        "tokenizer_hash": identity["tokenizer"],
        "template_hash": identity["template"],
        "identity": identity,
        "counts": summary,
    }
    if growth is not None:
        manifest |= growth.manifest(fingerprint, len(kept))
        progress.note(f"{name}: {growth.old.num_samples} samples kept, {len(kept) - growth.old.num_samples} new")
    write_prepared(work.folder, kept, manifest)
    stage.finish(summary)
    if growth is not None:
        growth.remove_old()
    _tell(name, summary, tally, progress)
    return summary


def _chats(cfg: PrepareConfig, tally: Tally) -> Iterator[tuple[Chat, bool]]:
    """Each chat with whether its file is held out whole."""

    def read(data: list[str | DataSource]) -> Iterator[Chat]:
        return read_chats(data, cfg.num_demo_prompts, cfg.roles)

    # By text as well as by ids: a held-out chat that is dropped, for want of an answer, has no ids.
    texts = {_prompt_text(chat) for chat in read(cfg.heldout_data) if chat.messages}
    data = islice(read(cfg.data), cfg.max_samples)
    for chat, whole in chain(zip(data, repeat(False)), zip(read(cfg.heldout_data), repeat(True))):
        if chat.refused:
            tally.drop(chat.refused, chat.place)
        elif not whole and chat.messages and _prompt_text(chat) in texts:
            tally.drop(PROMPT_HELD_OUT, chat.place)
        else:
            yield chat, whole


def _prompt_text(chat: Chat) -> bytes:
    return digest(json.dumps([[m["role"], m["content"]] for m in chat.prompt()]).encode())


def _reason_of(error: PrepareError) -> str:
    if isinstance(error, NotKept):
        return f"template_leaves_out_{error.what}"
    return "boundary_unclear" if isinstance(error, BoundaryUnclear) else "template_refused"


def held_out(draft: Draft, fraction: float) -> bool:
    """Decide by the ids of the prompt alone, so that order, other chats and answers change nothing."""
    return int(xxhash.xxh3_64_intdigest(b"held out\n" + draft.prompt)) < fraction * 2**64


def _from_chats(cfg: RunFile, template: ChatTemplate, tally: Tally) -> Iterator[Draft]:
    for chat, whole in _chats(cfg.prepare, tally):
        samples = _samples(cfg.prepare, template, chat, tally)
        made = [_draft(sample, chat.source, chat.messages) for sample in samples]
        if made:
            # Samples of one chat contain each other: all go where its first prompt goes.
            held = whole or held_out(made[0], cfg.prepare.heldout_fraction)
            yield from (replace(draft, heldout=held) for draft in made)


def _samples(cfg: PrepareConfig, template: ChatTemplate, chat: Chat, tally: Tally) -> list[Masked]:
    """Ids and masks of a chat; none, and a count, where it gives no sample."""
    if chat.input_ids is not None:
        return [(np.array(chat.input_ids, dtype=np.int32), np.array(chat.loss_mask, dtype=np.uint8))]
    # An assistant turn that opens a chat answers nothing.
    answers = [written(m) for m in chat.messages[1:] if m["role"] == "assistant"]
    if not answers:
        tally.drop("no_assistant_turn", chat.place)
    elif not any(answers):
        tally.drop("empty_answer", chat.place)
    else:
        what = Trained(cfg.train_turns == "last", cfg.train_tool_arguments)
        try:
            samples = masked_samples(template, chat.messages, chat.tools, what)
        except (BoundaryUnclear, NotKept, TemplateRefused) as exc:
            tally.drop(_reason_of(exc), f"{chat.place}: {exc.args[1]}")
            return []
        if not samples:
            tally.drop("nothing_to_train", chat.place)
        return samples
    return []


def _from_answers(cfg: RunFile, path: Path, tally: Tally) -> Iterator[Draft]:
    with open(path, "rb") as source:
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
        yield replace(_draft((ids, mask), row["source"], row["messages"]), heldout=row["heldout"])


_ANSWER_KEYS = {"row", "source", "heldout", "messages", "prompt_ids", "answer_ids", "finish_reason"}


def _answer(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise PrepareError("an answer on each line", f"{place}: {exc}", "run `headrace regenerate` again") from exc
    if not isinstance(row, dict) or not row.keys() >= _ANSWER_KEYS:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise PrepareError(f"keys {sorted(_ANSWER_KEYS)}", f"{place}: {found}", "run `headrace regenerate` again")
    return row


def _draft(sample: Masked, source: str, messages: Iterable[Mapping[str, Any]]) -> Draft:
    ids, mask = sample
    text = json.dumps([dict(m) for m in messages], ensure_ascii=False)
    return Draft(sample_id(ids, mask), ids, mask, source, heldout=False, messages=text)


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
    """Names, which become sources, and content of the files; where they lie changes nothing."""

    def told(given: str | DataSource) -> list[Any]:
        source = DataSource.of(given)
        if source.path == DEMO_DATA:
            content = digest(json.dumps(demo_prompts(cfg.num_demo_prompts)).encode()).hex()
        else:
            content = content_digest(source)
        how = source.model_dump(exclude={"path", "name"}, exclude_defaults=True)
        return [source_name(source), content, *([how] if how else [])]

    return {"data": [told(source) for source in cfg.data], "heldout": [told(source) for source in cfg.heldout_data]}
